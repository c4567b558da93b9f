"""Streams of engines with comments that the router cannot read: the way out is that of a lost connection."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.actors.tokens import pack
from baton.api.config import Config
from baton.api.resuming import COMMENT, Begun, SentPart, TokensSent, comment
from baton.api.routing.app import make_router
from baton.api.routing.forwarding import MOST_RETRIES
from baton.api.routing.router import ROUTER
from tests.api.fake_ring import WatchedServer, serving
from tests.api.routing.fake_engine import FakeEngine
from tests.api.routing.test_resumptions import CHAT, PATIENCE_S, STREAMS, check_lost, read
from tests.api.through_router import not_through_router

pytestmark = [pytest.mark.anyio, not_through_router]
OPENING = b'data: {"n": 1}\n\n'
BEGUN = comment(Begun(ids=["a"], seeds=[1], limits=[9], weights=""))
TOKENS = comment(TokensSent(parts=[SentPart(0, pack([5]), 1)]))
EVENT = b'data: {"n": 2}\n\n'


async def read_through(urls: list[str], path: str, bodies: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the events of streams of requests that are sent to a router at once."""
    app = make_router(Config(engine=tuple(urls)))
    async with asyncio.timeout(PATIENCE_S), WatchedServer(app) as router:
        while not all(view.takes_requests for view in app[ROUTER].fleet):  # noqa: ASYNC110 (a router has no event)
            await asyncio.sleep(0.01)
        url = str(router.make_url("")).rstrip("/")
        return await asyncio.gather(*(read(url, path, body) for body in bodies))


@pytest.mark.parametrize("path", STREAMS)
async def test_a_comment_that_cannot_be_read_ends_a_stream_that_no_engine_continues(path: str) -> None:
    stream = OPENING + BEGUN + EVENT + COMMENT + b"{\n\n"
    one, other = FakeEngine("one", stream=stream), FakeEngine("other", stream=stream)
    async with one.server, other.server:
        with capture_logs() as logs:
            [[first, last]] = await read_through([one.url, other.url], path, [STREAMS[path]])
    assert first == {"n": 1}, "the tokens of the second event are not known"
    check_lost(path, last)
    [doubt] = [line for line in logs if line["event"] == "engine in doubt"]
    assert doubt["log_level"] == "warning" and doubt["engine"] in ("one", "other")
    assert "a comment of the engine cannot be read" in doubt["why"]


async def test_another_engine_answers_instead_of_one_that_sends_tokens_before_the_beginning() -> None:
    """Two requests at once: each engine gets one first."""
    faulty = FakeEngine("one", stream=OPENING + EVENT + TOKENS)
    async with faulty.server, serving() as served:
        streams = await read_through([faulty.url, served.url], "/v1/chat/completions", [CHAT, CHAT])
    assert faulty.asked == 1
    for events in streams:
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == served.ring.reply


async def test_no_engine_is_asked_for_a_stream_that_nobody_reads() -> None:
    """A stream is begun again as often as a request may be tried. The last attempt is followed by no other."""
    engines = [FakeEngine(name, stream=OPENING + TOKENS) for name in ("one", "two", "three", "four")]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.server)
        [[last]] = await read_through([engine.url for engine in engines], "/v1/chat/completions", [CHAT])
    check_lost("/v1/chat/completions", last)
    assert sum(engine.asked for engine in engines) == 1 + MOST_RETRIES
