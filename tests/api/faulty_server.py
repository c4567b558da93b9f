"""`python -m tests.api.faulty_server FAULT DIR [option=value …]`: the real server with a fault.

FAULT is one of:
    scheduler, cache, forward, results: this actor raises once, at its 200th message
    prompt: the model raises at a prompt that contains MARK
    device: a call on the device other than a step raises at a prompt that contains MARK
    always: the cache raises at every Acquire of a prompt that contains MARK
"""

import sys
from typing import Any

from torch import AcceleratorError, Tensor

from baton.actors.cache.actor import Cache
from baton.actors.forward.actor import Forward
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.messages import Acquire, Message
from baton.actors.requests import Request
from baton.actors.results.actor import ResultProcessor
from baton.actors.scheduler.actor import Scheduler
from baton.actors.tokens import pack, unpack
from baton.api.config import load
from baton.api.machine.signals import Signals
from baton.api.serve import serve
from baton.api.wiring import load as load_model
from baton.models.batch import Batch, Pools
from baton.models.hash import HashModel

MARK = 255
ACTORS: dict[str, Any] = {"scheduler": Scheduler, "cache": Cache, "forward": Forward, "results": ResultProcessor}


def break_actor(actor: Any, name: str) -> None:
    receive = actor.receive
    left = 200

    def raising(self: Any, message: Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError(f"{name} is broken")
        receive(self, message)

    actor.receive = raising


def break_device() -> None:
    open_row = TorchDevice.open_row

    def raising(device: TorchDevice, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        if MARK in unpack(request.tokens)[: request.prompt_len]:
            raise AcceleratorError("the device is gone")
        open_row(device, row, grant, slot, request, pages)

    TorchDevice.open_row = raising  # type: ignore[method-assign]


def break_prompts() -> None:
    forward = HashModel.forward

    def raising(model: HashModel, batch: Batch, pools: Pools) -> Tensor:
        if batch.prefill is not None and (batch.tokens[: batch.prefill.offsets[-1]] == MARK).any():
            raise ValueError("no kernel for this")
        return forward(model, batch, pools)

    HashModel.forward = raising  # type: ignore[method-assign]


def break_always() -> None:
    receive = Cache.receive

    def raising(cache: Cache, message: Message) -> None:
        if isinstance(message, Acquire) and message.tokens.endswith(pack([MARK])):
            raise RuntimeError("the cache is broken")
        receive(cache, message)

    Cache.receive = raising  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, folder, *options = sys.argv[1:]
    if fault in ACTORS:
        break_actor(ACTORS[fault], fault)
    else:
        {"device": break_device, "prompt": break_prompts, "always": break_always}[fault]()
    values = {"model": folder, "port": "0", "log_format": "json"} | dict(option.split("=") for option in options)
    signals = Signals()
    signals.take()
    serve(load(values), load_model, signals)
