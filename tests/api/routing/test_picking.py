"""The engine that a router picks, from the events of engines and from what it has sent to them."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest

from baton.api.events.frames import Change, Load, Snapshot
from baton.api.routing.asking import Asking, read_asking
from baton.api.routing.counts import RouterCounts
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import Forwarder

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


class Engine:
    """An engine of a fleet that says in its events that it is idle."""

    def __init__(self, fleet: Fleet, slots: int) -> None:
        self._fleet, self._numbers = fleet, count(1)
        self._load = Load(token_seconds=0.001, step_seconds=0.01, slots={"free": slots - 1, "cached": 1})
        self.view = EngineView(len(list(fleet)), "http://engine")
        fleet._views[self.view.number] = self.view
        start = Snapshot(
            sequence=0, boot="b", name="e", model="m", role="both", phase="ready", load=self._load, states=[], names=[]
        )
        fleet._take(self.view, start)

    def report(self) -> None:
        self._fleet._take(self.view, Change(sequence=next(self._numbers), phase="ready", load=self._load))


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet({})


def prompts() -> Iterator[Asking]:
    """Yield prompts that have nothing in common."""
    for number in count():
        text = f'{{"messages": [{{"role": "user", "content": "{number} {"word " * 400}"}}]}}'
        yield read_asking(CHAT, text.encode(), b"")


async def test_an_engine_with_more_slots_is_picked_for_more_chats(fleet: Fleet) -> None:
    small, large = Engine(fleet, 4), Engine(fleet, 12)
    forwarder, fresh = Forwarder(fleet, None, RouterCounts(fleet)), prompts()  # type: ignore[arg-type]
    picked = []
    for _ in range(40):
        view, _ = await forwarder.pick(next(fresh))
        picked.append(view)
        small.report()
        large.report()
    assert 26 <= picked.count(large.view) <= 34


async def test_a_prompt_that_was_just_sent_is_picked_for_the_same_engine(fleet: Fleet) -> None:
    engines = [Engine(fleet, 16) for _ in range(3)]
    forwarder, fresh = Forwarder(fleet, None, RouterCounts(fleet)), prompts()  # type: ignore[arg-type]
    for _ in engines:
        await forwarder.pick(next(fresh))
    for engine in engines:
        engine.report()
    same = next(fresh)
    assert len({(await forwarder.pick(same))[0].number for _ in range(6)}) == 1
    assert len({(await forwarder.pick(next(fresh)))[0].number for _ in range(6)}) == 3


async def test_an_engine_that_is_lost_twice_ends_a_wait_once() -> None:
    view = EngineView(1, "http://a", phase="ready")

    async def wait() -> str:
        with suppress(ConnectionError), view.unless_lost():
            await asyncio.sleep(60)
        return "another engine"

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    for _ in range(2):
        for close in list(view.closing):
            close()
    assert await waiting == "another engine"
