"""Streams that another engine is to continue: it refuses, or thousands of tokens have been delivered."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.api.config import Config
from baton.api.routing.app import make_router
from baton.api.routing.router import ROUTER
from tests.api.fake_ring import WatchedServer
from tests.api.hash_traffic import make_checkpoint
from tests.api.routing.fake_engine import FakeEngine
from tests.api.routing.test_router import ROUTE, TEMPLATE, until
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
TOKENS = 100
LONG = 12_000  # tokens of a long output, of which KILLED_AT have reached the client when its engine ends
KILLED_AT = 10_000
PATIENCE_S = 60
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": TOKENS, "ignore_eos": True},
    "/v1/completions": {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True},
    "/v1/messages": CHAT | {"model": "default", "max_tokens": TOKENS},
    "/v1/responses": {"input": "Hello", "max_output_tokens": TOKENS, "temperature": 0, "stream": True},
    "/generate": {"input_ids": [80, 81], "stream": True, "sampling_params": {"max_new_tokens": TOKENS}},
}


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    make_checkpoint(folder, **{"vocab_size": 90, "delay_ms": [8, 12]} | config)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Engines:
    """Engines in front of which a router runs. The first one answers alone until the other one joins."""

    def __init__(self, stack: ExitStack, first: Path, other: Path, *options: str) -> None:
        """options: of the other engine."""
        started = [*SERVE, str(first)], [*SERVE, str(other), *options]
        engines = [ServerProcess(each) for each in started]  # both start at the same time
        self.first, self.other = map(stack.enter_context, engines)
        self.router = stack.enter_context(ServerProcess([*ROUTE, "--engine", self.first.url]))

    async def fail_over(self, streams: int) -> None:
        """Kill the first engine as soon as it has begun so many streams, after the other one has joined."""
        await asyncio.to_thread(until, lambda: self.router.get("/debug/engines")[0]["load"]["rows"] == streams)
        await self.join()
        self.first.kill_now()

    async def join(self) -> None:
        """Let the other engine join."""
        await asyncio.to_thread(self.router.post, "/debug/engines", {"url": self.other.url})
        await asyncio.to_thread(until, lambda: self._phases() == ["ready", "ready"])

    def _phases(self) -> list[str]:
        return [engine["phase"] for engine in self.router.get("/debug/engines")]

    def continued(self) -> int:
        return sum(line["event"] == "another engine continues a stream" for line in self.router.log)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def read(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, without the mark at its end."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http, http.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.read()).decode().split("\n")
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_refused_resumption_ends_the_stream_with_an_error(path: str) -> None:
    one, other = FakeEngine("one"), FakeEngine("other")
    async with one.server, other.server:
        app = make_router(Config(engine=(one.url, other.url)))
        async with WatchedServer(app) as router:
            fleet = app[ROUTER].fleet
            async with asyncio.timeout(PATIENCE_S):
                while not all(view.takes_requests for view in fleet):  # noqa: ASYNC110 (a router has no event for tests)
                    await asyncio.sleep(0.01)
            first, second, last = await read(str(router.make_url("")).rstrip("/"), path, STREAMS[path])
    assert (first, second, one.asked, other.asked) == ({"n": 1}, {"n": 2}, 1, 1)
    check_lost(path, last)


def check_lost(path: str, event: dict[str, Any]) -> None:
    """Check that this event says that the engine was lost. An error of Messages has no code."""
    error = event if path == "/v1/responses" else event["error"]
    assert error.get("code") == (None if path == "/v1/messages" else "engine_lost"), event
    assert "the engine was lost" in error["message"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "options"),
    [({"delay_ms": [9, 9]}, ()), ({}, ("--max-model-len", "96"))],
    ids=["another model", "a short context"],
)
async def test_a_stream_whose_resumption_is_refused_ends_with_an_error(
    stack: ExitStack, tmp_path: Path, config: dict[str, Any], options: tuple[str, ...]
) -> None:
    """The other model has the same vocabulary and context, but other tokens would follow."""
    other = checkpoint(tmp_path / "other", **config)
    engines = Engines(stack, checkpoint(tmp_path / "model"), other, *options)
    streams = [asyncio.ensure_future(read(engines.router.url, path, body)) for path, body in STREAMS.items()]
    await engines.fail_over(len(STREAMS))
    for path, events in zip(STREAMS, await asyncio.gather(*streams), strict=True):
        assert len(events) > 2, "the stream had begun"
        check_lost(path, events[-1])
    assert engines.continued() == len(STREAMS)
    assert engines.router.status("/ready") == 200, "the engine that refuses is not lost"


@pytest.mark.soak
async def test_thousands_of_tokens_are_continued(stack: ExitStack, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", delay_ms=[0, 0], max_position_embeddings=2**14)
    engines = Engines(stack, model, model)
    await engines.join()
    holders, body = {engines.first, engines.other}, STREAMS["/v1/completions"] | {"max_tokens": LONG}
    text, last, gaps = "", time.monotonic(), [0.0]
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession() as http,
        http.post(f"{engines.router.url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            text += json.loads(line[6:])["choices"][0]["text"]
            if len(text) >= KILLED_AT and len(holders) == 2:
                views = await asyncio.to_thread(engines.router.get, "/debug/engines")
                [url] = [view["url"] for view in views if view["load"]["rows"]]
                [victim] = [engine for engine in holders if engine.url == url]
                holders.remove(victim)
                victim.kill_now()
    [left] = holders
    assert engines.continued() == 1
    print(f"the longest gap of {LONG} tokens, of which {KILLED_AT} were delivered: {max(gaps):.2f} s")
    status, whole = await asyncio.to_thread(left.post, "/v1/completions", body | {"stream": False})
    assert status == 200 and text == whole["choices"][0]["text"] and len(text) == LONG
