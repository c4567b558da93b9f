"""`python -m tests.api.fake_server MODEL`: the real server process around the fake ring. MODEL names its behaviour.

slow: the model takes for ever to load. broken: the model cannot be loaded. dying: the ring fails at the first request.
pausing: an answer takes a second. held: requests are never answered.
restoring: sessions take for ever to restore. stuck: the first request stops the event loop for ever.
"""

import asyncio
import sys
import time

from baton.actors.actor import Address
from baton.actors.messages import Message, Submit
from baton.api.config import load
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.machine.signals import Signals
from baton.api.serve import LoadedModel, Progress, StartError, serve
from baton.api.sessions import store
from tests.api.fake_ring import VOCAB, FakeRing, FakeText


class Ring(FakeRing):
    def __init__(self, gateway: Gateway, behaviour: str) -> None:
        super().__init__(gateway)
        self._broken = asyncio.Event()
        self._behaviour = behaviour
        self.held = behaviour in ("dying", "held")
        self.pause = 1 / 14 if behaviour == "pausing" else 0.0

    def send(self, to: Address, message: Message) -> None:
        super().send(to, message)
        if self._behaviour == "dying" and isinstance(message, Submit):
            self._broken.set()
        if self._behaviour == "stuck" and isinstance(message, Submit):
            print("stuck", file=sys.stderr)
            time.sleep(3600)

    async def run(self) -> None:
        await self._broken.wait()
        raise RuntimeError("the device is on fire")


def load_fake(behaviour: str, on_progress: Progress) -> LoadedModel:
    on_progress(1, 2)
    if behaviour == "slow":
        time.sleep(3600)
    if behaviour == "broken":
        raise StartError("org/model is not a folder")
    return LoadedModel(ServedModel(FakeText(), VOCAB, 256), ["8 slots"], lambda gateway: Ring(gateway, behaviour))


if __name__ == "__main__":
    config = load({"model": sys.argv[1], "port": "0", "log_format": "json"} | dict(a.split("=") for a in sys.argv[2:]))
    signals = Signals()
    signals.take()
    if config.model == "restoring":
        store.read_sessions = lambda *_: time.sleep(3600)
    serve(config, lambda config, on_progress: load_fake(config.model or "", on_progress), signals)
