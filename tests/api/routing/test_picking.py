"""The engine that a router picks, from the events of engines and from what it has sent to them."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, cast

import pytest
from aiohttp import ClientConnectionResetError, WSMessage, WSMsgType

from baton.api.errors import ApiError
from baton.api.events.frames import Change, Load, Snapshot, name_of
from baton.api.routing.asking import Asking, read_asking
from baton.api.routing.counts import RouterCounts
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import Forwarder
from baton.api.routing.sockets import ClientSocket, EngineSocket, SocketError, SocketEvent

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


async def test_sessions_of_one_name_are_opened_at_one_engine(fleet: Fleet) -> None:
    """The engine then refuses the second one, also if its events have not named the first one yet."""
    engines = [Engine(fleet, 16) for _ in range(3)]
    forwarder = Forwarder(fleet, None, RouterCounts(fleet))  # type: ignore[arg-type]
    for path, field in (("/v1/sessions", "id"), ("/open_session", "session_id"), ("/v1/conversations", "id")):
        asking = read_asking(path, f'{{"{field}": "{path}"}}'.encode(), b"")
        assert len({(await forwarder.pick(asking))[0].number for _ in range(6)}) == 1
    unnamed = read_asking("/v1/sessions", b"{}", b"")
    assert len({(await forwarder.pick(unnamed))[0].number for _ in range(6)}) == len(engines)


async def test_a_copy_of_a_session_gets_no_name_of_another_engines_session(fleet: Fleet) -> None:
    one, other = Engine(fleet, 16), Engine(fleet, 16)
    forwarder = Forwarder(fleet, None, RouterCounts(fleet))  # type: ignore[arg-type]
    for view, id in ((one.view, "a"), (one.view, "b"), (other.view, "c")):
        fleet.expect(name_of(b"", id), view)

    async def fork(id: str) -> EngineView:
        return (await forwarder.pick(read_asking("/v1/sessions/a/fork", f'{{"id": "{id}"}}'.encode(), b"")))[0]

    assert [await fork(id) for id in ("b", "d")] == [one.view] * 2, "the engine knows whether it has the name"
    with pytest.raises(ApiError, match="session 'c' exists already") as refusal:
        await fork("c")
    assert refusal.value.code == "duplicate_session_id"


async def test_engines_with_one_name_have_different_labels(fleet: Fleet) -> None:
    names = [Engine(fleet, 16).view.name for _ in range(2)]
    assert names == ["e", "e (engine)"]


def event(type: str, stream_id: str | None = None, code: str = "") -> SocketEvent:
    return SocketEvent(type, stream_id, status=400, error=SocketError(code) if code else None)


def test_open_responses_of_a_websocket_are_counted_until_they_end() -> None:
    engine = EngineSocket(None)  # type: ignore[arg-type]
    for name in ("a", "a", "b", None):
        engine.note_sent("response.create", name)
    for other in ("response.cancel", "unknown", None, 7):
        engine.note_sent(other, "c")
    assert engine.open == {"a": 2, "b": 1, None: 1}
    for late in ("response_not_found", "unknown_event_type"):
        engine.note_received(event("error", "a", late))
    engine.note_received(event("response.output_text.delta", "b"))
    assert engine.open == {"a": 2, "b": 1, None: 1}
    for name, ending in (("a", event("error", "a", "queue_full")), ("b", event("response.completed", "b"))):
        engine.note_received(ending)
        engine.note_received(event("error", f"not {name}", "queue_full"))
    assert engine.open == {"a": 1, None: 1} and len(engine.open) == 2, "names are not kept after the end"


async def test_a_websockets_message_goes_to_the_engine_that_answers_its_stream(fleet: Fleet) -> None:
    first, latest = Engine(fleet, 16).view, Engine(fleet, 16).view
    relay = ClientSocket(None, None, None)  # type: ignore[arg-type]
    relay._engines = {first: EngineSocket(None), latest: EngineSocket(None)}  # type: ignore[arg-type]
    relay._engines[first].open["a"] = 1
    relay._engines[first].note_made("a", "stored here")
    assert relay.next_for("a") is first
    assert relay.next_for("b") is latest is relay.next_for(None)
    assert relay.maker("stored here", True) is first and relay.maker("elsewhere", True) is None
    relay._engines[first].note_made("a", "the next one")
    assert relay.maker("stored here", True) is None, "only the latest response of a stream can be continued"


class ClosingSocket:
    """The websocket to an engine that is being lost: it cannot be sent to, and ends later."""

    def __init__(self, last: WSMessage | None) -> None:
        """last: the message after which it is of no use; None: it ends without one."""
        self.last, self.closed = last, False
        self.ended = asyncio.Event()

    async def send_str(self, data: str) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    def __aiter__(self) -> "ClosingSocket":
        return self

    async def __anext__(self) -> WSMessage:
        await self.ended.wait()
        if self.last is None:
            raise StopAsyncIteration
        return self.last

    async def close(self) -> None:
        self.closed = True


class ListeningClient:
    """A client's websocket that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    async def send_json(self, event: dict[str, Any]) -> None:
        self.got.append(event)


@pytest.mark.parametrize(
    "last", [None, WSMessage(WSMsgType.ERROR, ValueError(), ""), WSMessage(WSMsgType.BINARY, b"", "")]
)
async def test_a_response_that_cannot_be_sent_ends_with_one_error(last: WSMessage | None) -> None:
    client, socket, view = ListeningClient(), ClosingSocket(last), EngineView(0, "http://engine", phase="ready")
    relay = ClientSocket(cast(Any, None), cast(Any, client), cast(Any, None))
    engine = relay._engines[view] = EngineSocket(cast(Any, socket))
    pumping = asyncio.ensure_future(relay._pump(view, engine))
    await asyncio.sleep(0)
    await relay.send(view, b"{}", "response.create", "a")
    with pytest.raises(ClientConnectionResetError):
        await relay.send(view, b"{}", "response.cancel", "a")
    socket.ended.set()
    await pumping
    assert [(event["stream_id"], event["error"]["code"]) for event in client.got] == [("a", "engine_lost")]
    assert view not in relay._engines and socket.closed
