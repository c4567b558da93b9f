"""Clients that leave, whose engine is not at fault; and answers after which no other engine is asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest

from baton.api import errors
from baton.api.config import Config, ConfigError
from baton.api.errors import ApiError
from baton.api.routing.app import make_router
from baton.api.routing.asking import read_asking
from baton.api.routing.bodies import ClientStream, Take
from baton.api.routing.counts import RouterCounts
from baton.api.routing.delivery import Delivery
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import MOST_RETRIES, EngineStream, Forwarder
from baton.api.routing.router import ROUTER
from tests.api.fake_ring import WatchedServer
from tests.api.routing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


class LeftClient:
    """The transport to a client that has left."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 0


class OneChunk:
    """An engine's answer of one chunk."""

    status, reason = 200, "OK"

    def __init__(self) -> None:
        self.headers = dict[str, str]()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> "OneChunk":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def pass_on(self, take: Take, caught_up: object) -> None:
        take(b"chunk")


async def test_an_engine_is_not_lost_because_its_client_has_left() -> None:
    async with aiohttp.ClientSession() as http:
        fleet = Fleet({})
        counts = RouterCounts(fleet)
        delivery = Delivery(fleet, Forwarder(fleet, http, counts), counts, timeout=1.0)
        answer = cast(Any, OneChunk())
        begun = EngineStream(EngineView(0, "http://engine"), answer, answer)
        client = ClientStream(cast(Any, LeftClient()), cast(Any, None), chunked=True)
        with pytest.raises(ConnectionResetError) as failure:
            await delivery._copy(begun, client, None, read_asking("/", b"", b""))
    assert not isinstance(failure.value, aiohttp.ClientError), "otherwise it would count as the engine's failure"


async def test_an_answer_is_closed_if_its_client_leaves_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(response: object, request: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr("baton.api.routing.delivery.begin", begin)
    unused, answer = cast(Any, None), cast(Any, OneChunk())
    begun = EngineStream(EngineView(0, "http://engine"), answer, answer)
    with pytest.raises(ConnectionResetError):
        await Delivery(unused, unused, unused, timeout=1.0)._deliver(unused, unused, begun)
    assert answer.closed


@asynccontextmanager
async def routed(engines: Sequence[FakeEngine]) -> AsyncIterator[tuple[Any, Fleet]]:
    """Run a router in front of engines. Yield a function that returns its answer to a POST, and its fleet."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.server)
        app = make_router(Config(engine=tuple(engine.url for engine in engines)))
        router = await stack.enter_async_context(WatchedServer(app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(10):
            while not all(view.takes_requests for view in app[ROUTER].fleet):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        async def post(path: str, body: Any) -> tuple[int, Any]:
            async with asyncio.timeout(10), http.post(router.make_url(path), json=body) as answer:
                return answer.status, await answer.json()

        yield post, app[ROUTER].fleet


BUSY = errors.unavailable("the compiler is busy", "grammars_busy")


@pytest.mark.parametrize(
    ("refusal", "requests"),
    [(BUSY, 1 + MOST_RETRIES), (errors.not_retryable(BUSY), 1), (errors.aborted(), 1)],
)
async def test_another_engine_is_not_asked_after_an_answer_that_forbids_it(refusal: ApiError, requests: int) -> None:
    engines = [FakeEngine(name, refusal=refusal) for name in ("one", "other")]
    async with routed(engines) as (post, _):
        status, answer = await post("/v1/embeddings", {"input": "a"})
    assert (status, answer["error"]["code"]) == (refusal.status, refusal.code)
    assert sum(engine.asked for engine in engines) == requests


async def test_a_command_reaches_every_engine_although_one_hangs() -> None:
    """It is answered when the engine that hangs is lost."""
    hanging, other = FakeEngine("one", hangs=True), FakeEngine("other", refusal=BUSY)
    async with routed([hanging, other]) as (post, fleet):
        answer = asyncio.ensure_future(post("/flush_cache", {}))
        async with asyncio.timeout(10):
            while not (hanging.asked and other.asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        fleet.lose(next(view for view in fleet if view.name == "one"), "silent")
        status, error = await answer
    assert (status, error["error"]["code"]) == (503, "engine_lost")


@pytest.mark.parametrize("url", ["ftp://host", "http://[::1", "http://", "", "host:8000"])
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--engine: expected http://HOST:PORT"):
        make_router(Config(engine=(url,)))
