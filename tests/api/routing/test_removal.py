"""Engines that are removed from a router while they answer: their requests go on to the end, and new ones go elsewhere.

The router runs in this process, so that its fleet can be looked at.
"""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.api.config import Config
from baton.api.routing import delivery
from baton.api.routing.app import make_router
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.router import ROUTER
from baton.models.hash_definition import expected_output
from tests.api.fake_ring import WatchedServer
from tests.api.hash_traffic import VOCAB, last_event, make_checkpoint
from tests.api.routing.test_router import TEMPLATE
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
TOKENS = 160  # of an answer, which takes more than a second
PATIENCE_S = 20
PROMPT = [7, 8, 9]
CREATE = {"type": "response.create", "max_output_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("removal"), delay_ms=[10, 10])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def other(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), "--engine-name", "other"]) as engine:
        yield engine


@pytest.fixture
def leaving(checkpoint: Path) -> Iterator[ServerProcess]:
    """Start the engine that will be removed."""
    with ServerProcess([*SERVE, str(checkpoint), "--engine-name", "one"]) as engine:
        yield engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (a router has no event for tests)
            await asyncio.sleep(0.01)


class Routed:
    """A router in front of the leaving engine alone, a client of it, and what the client's requests are answered."""

    def __init__(self, http: aiohttp.ClientSession, fleet: Fleet, leaving: ServerProcess) -> None:
        self.http, self.fleet, self.leaving = http, fleet, leaving
        self.session = self.response = ""  # ids of a session and a response of the leaving engine

    @property
    def view(self) -> EngineView:
        """The leaving engine, until it is removed."""
        return next(view for view in self.fleet if view.url == self.leaving.url)

    async def post(self, path: str, body: dict[str, Any], method: str = "POST") -> tuple[int, Any]:
        async with self.http.request(method, path, json=body) as answer:
            return answer.status, await answer.json()

    async def stream(self, path: str, body: dict[str, Any]) -> Any:
        """Return the last event of a stream."""
        async with self.http.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            if path == "/v1/responses":
                return (await answer.read()).decode().split("\n\n")[-2]
            return await last_event(answer)

    async def websocket(self) -> dict[str, Any]:
        """Return the last event of a response over a websocket."""
        async with self.http.ws_connect("/v1/responses") as socket:
            await socket.send_json(CREATE | {"input": "a"})
            return await ended(socket)

    async def prepare(self) -> None:
        """Open a session and make a response, to which further requests are bound."""
        self.session = (await self.post("/v1/sessions", {}))[1]["id"]
        self.response = (await self.post("/v1/responses", {"input": "a", "max_output_tokens": 1}))[1]["id"]
        await until(lambda: len(self.view.names) >= 2)

    def requests(self) -> list[Coroutine[Any, Any, Any]]:
        """Return a request of each kind: a stream, a whole answer, a turn, a bound response, and a websocket's."""
        tokens = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}}
        bound = {"input": "b", "previous_response_id": self.response, "max_output_tokens": TOKENS, "stream": True}
        turn = {"input_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        return [
            self.stream("/generate", tokens | {"stream": True}),
            self.post("/generate", tokens),
            self.post(f"/v1/sessions/{self.session}/turns", turn),
            self.stream("/v1/responses", bound),
            self.websocket(),
        ]

    async def begin(self) -> list[asyncio.Task[Any]]:
        """Begin a request of each kind, and wait until the leaving engine computes all of them."""
        tasks = [asyncio.ensure_future(each) for each in self.requests()]
        await until(lambda: self.view.load.rows == len(tasks))
        return tasks

    async def remove(self) -> None:
        assert (await self.post("/debug/engines", {"url": self.leaving.url}, "DELETE"))[0] == 200

    async def add(self, engine: ServerProcess) -> None:
        assert (await self.post("/debug/engines", {"url": engine.url}))[0] == 200
        await until(lambda: any(view.url == engine.url and view.takes_requests for view in self.fleet))


async def ended(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    """Return the last event of a response."""
    while True:
        event: dict[str, Any] = await socket.receive_json(timeout=PATIENCE_S)
        if event["type"] in ("response.completed", "response.incomplete", "error"):
            return event


@asynccontextmanager
async def routed(leaving: ServerProcess) -> AsyncIterator[Routed]:
    app = make_router(Config(engine=(leaving.url,)))
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        WatchedServer(app) as router,
        aiohttp.ClientSession(router.make_url("")) as http,
    ):
        running = Routed(http, app[ROUTER].fleet, leaving)
        await until(lambda: running.view.takes_requests)
        yield running


def check_whole(answers: list[Any]) -> None:
    """Check that the requests of `Routed.requests` have all been answered to their end."""
    expected = expected_output(PROMPT, TOKENS, VOCAB)
    stream, (generated, whole), (turned, turn), bound, socket = answers
    assert stream["output_ids"] == expected and stream["meta_info"]["finish_reason"]["type"] == "length"
    assert (generated, whole["output_ids"]) == (200, expected)
    assert (turned, turn["output_ids"]) == (200, expected)
    assert bound.startswith("event: response.incomplete"), bound
    assert socket["type"] == "response.incomplete" and socket["response"]["usage"]["output_tokens"] == TOKENS


def views_of(url: str) -> list[EngineView]:
    """Return the views of an engine that something still refers to."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is EngineView and each.url == url]


def logged(engine: ServerProcess, endpoint: str) -> int:
    """Return how many requests of an endpoint an engine has answered."""
    return sum(line.get("endpoint") == endpoint for line in engine.log)


async def test_a_removed_engine_answers_its_requests_to_the_end(leaving: ServerProcess, other: ServerProcess) -> None:
    """New requests go to another engine meanwhile. After the last answer nothing refers to the removed engine."""
    before = logged(other, "POST /generate")
    async with routed(leaving) as router:
        await router.prepare()
        tasks = await router.begin()
        await router.add(other)
        await router.remove()
        assert [view.url for view in router.fleet] == [other.url]
        prompt = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        for _ in range(4):
            assert (await router.post("/generate", prompt))[0] == 200
        assert not any(task.done() for task in tasks), "the test is fast enough"
        assert (await router.post(f"/v1/sessions/{router.session}/fork", {}))[0] == 404
        check_whole(await asyncio.gather(*tasks))
        await until(lambda: logged(other, "POST /generate") == before + 4)
        await until(lambda: not router.fleet._removed)
        await until(lambda: views_of(leaving.url) == [])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_requests_of_a_removed_engine_that_is_lost_end_as_for_any(
    leaving: ServerProcess, other: ServerProcess, how: signal.Signals
) -> None:
    async with routed(leaving) as router:
        await router.prepare()
        tasks = await router.begin()
        await router.add(other)
        await router.remove()
        await asyncio.sleep(0.2)
        leaving.process.send_signal(how)
        stream, (generated, whole), (turned, turn), bound, socket = await asyncio.gather(*tasks)
        leaving.kill_now()
        await until(lambda: not router.fleet._removed)
    expected = expected_output(PROMPT, TOKENS, VOCAB)
    assert stream["output_ids"] == expected and (generated, whole["output_ids"]) == (200, expected)
    assert (turned, turn["error"]["code"]) == (503, "engine_lost"), "no other engine says that it has no such session"
    assert bound.startswith("event: error") and "engine_lost" in bound
    assert socket["error"]["code"] == "engine_lost"


async def test_an_engine_that_is_added_again_while_its_old_requests_run(leaving: ServerProcess) -> None:
    async with routed(leaving) as router:
        await router.prepare()
        tasks = await router.begin()
        old = router.view
        await router.remove()
        await router.add(leaving)
        assert router.view is not old and router.view.name == old.name
        _, copy = await router.post(f"/v1/sessions/{router.session}/fork", {})
        router.session = copy["id"]
        again = [asyncio.ensure_future(each) for each in router.requests()]
        await until(lambda: router.view.load.rows > len(again))
        check_whole(await asyncio.gather(*tasks))
        assert old.following is not None
        await until(old.following.done)
        check_whole(await asyncio.gather(*again))


async def test_an_idle_engine_is_forgotten_at_once(leaving: ServerProcess) -> None:
    async with routed(leaving) as router:
        await router.remove()
        await until(lambda: not router.fleet._removed and views_of(leaving.url) == [])


async def test_a_websocket_goes_on_with_another_engine(leaving: ServerProcess, other: ServerProcess) -> None:
    """The removed engine ends the response that it computes. A response for the websocket alone cannot be continued."""
    async with routed(leaving) as router, router.http.ws_connect("/v1/responses") as socket:
        await socket.send_json(CREATE | {"input": "a", "store": False, "stream_id": "a", "max_output_tokens": 1})
        previous = (await ended(socket))["response"]["id"]
        await socket.send_json(CREATE | {"input": "b", "stream_id": "b"})
        await until(lambda: router.view.load.rows == 1)
        await router.add(other)
        before = logged(other, "GET /v1/responses")
        await router.remove()
        await socket.send_json(CREATE | {"input": "c", "stream_id": "a", "previous_response_id": previous})
        refusal = await ended(socket)
        assert refusal["stream_id"] == "a" and refusal["error"]["code"] == "previous_response_not_found"
        answer = await ended(socket)
        assert answer["stream_id"] == "b" and answer["response"]["usage"]["output_tokens"] == TOKENS
        await until(lambda: not router.fleet._removed and views_of(leaving.url) == [])
        await socket.send_json(CREATE | {"input": "d", "stream_id": "b", "max_output_tokens": 1})
        assert (await ended(socket))["type"] == "response.incomplete"
        await socket.close()
        await until(lambda: logged(other, "GET /v1/responses") == before + 1)


async def test_a_running_response_of_a_removed_engine_can_be_cancelled(leaving: ServerProcess) -> None:
    async with routed(leaving) as router, router.http.ws_connect("/v1/responses") as socket:
        await socket.send_json(CREATE | {"input": "a", "max_output_tokens": 3000, "ignore_eos": True})
        id = (await socket.receive_json(timeout=PATIENCE_S))["response"]["id"]
        await router.remove()
        await socket.send_json({"type": "response.cancel", "response_id": id})
        answer = await ended(socket)
        assert answer["response"]["id"] == id and answer["response"]["usage"]["output_tokens"] < 3000


async def test_an_idle_websocket_to_a_removed_engine_is_closed(leaving: ServerProcess, other: ServerProcess) -> None:
    async with routed(leaving) as router, router.http.ws_connect("/v1/responses") as socket:
        await router.add(other)
        await router.remove()
        await until(lambda: not router.fleet._removed and views_of(leaving.url) == [])
        await socket.send_json(CREATE | {"input": "a", "max_output_tokens": 1})
        assert (await ended(socket))["type"] == "response.incomplete"


async def test_an_engine_is_followed_while_the_head_of_a_stream_is_sent(
    leaving: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may be slow to take it."""
    begin, followed = delivery.begin, list[bool]()

    async def begin_late(*arguments: Any) -> Any:
        [view] = router.fleet
        await router.remove()
        await asyncio.sleep(1.0)  # an event is due every half second
        followed.append(view in router.fleet._removed)
        return await begin(*arguments)

    monkeypatch.setattr(delivery, "begin", begin_late)
    async with routed(leaving) as router:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0}, "stream": True}
        assert (await router.stream("/generate", body))["output_ids"] == expected_output(PROMPT, 9, VOCAB)
        assert followed == [True]


async def test_a_response_that_was_taken_over_is_found_after_its_engine_was_added_again() -> None:
    fleet = Fleet({})
    first, second = EngineView(0, "http://engine"), EngineView(1, "http://engine")
    fleet._views[0] = first
    fleet.take_over("name", first)
    assert fleet.holder("name") is first
    fleet.remove(first)
    assert fleet.holder("name") is None
    fleet._views[1], fleet._holders["name"] = second, 1
    assert fleet.holder("name") is second
