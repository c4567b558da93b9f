"""Sessions on a real server: every token of every turn is right, and a turn computes only its new tokens."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.models.hash_definition import expected_output
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import VOCABULARY, write_tokenizer

pytestmark = pytest.mark.anyio

SMALL = ["--page-size", "4", "--max-running", "4", "--step-tokens", "64", "--track-interval", "16"]
TURNS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint of the hash family."""
    folder: Path = tmp_path_factory.mktemp("hash")
    write_tokenizer(folder)
    config = {"model_type": "hash", "vocab_size": VOCABULARY, "chunk_size": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def check_state(http: aiohttp.ClientSession, session: dict[str, Any]) -> None:
    """Check that the state shown is one of the session's tokens, and the one that GET shows right after.

    A state may be moved to a lower tier in between, or be lost.
    """
    state = session["state"]
    assert state["position"] <= session["position"]
    async with http.get(f"/v1/sessions/{session['id']}") as response:
        later = (await response.json())["state"]
    assert later["position"] in (state["position"], 0)


class Client:
    """A client of one session, which checks every answer with the hash model and its own copy of the log."""

    def __init__(self, http: aiohttp.ClientSession, session: str, log: list[int], ends: dict[int, int]) -> None:
        self.http = http
        self.path = f"/v1/sessions/{session}"
        self.log = log
        self.ends = {0: 0, **ends}

    @classmethod
    async def create(cls, http: aiohttp.ClientSession) -> "Client":
        return cls(http, (await post(http, "/v1/sessions", {}))["id"], [], {})

    async def turn(self, ids: list[int], count: int) -> int:
        """Run a turn, and return how many tokens of the log were cached."""
        before = len(self.log)
        self.log += ids
        body = {"input_ids": ids, "max_tokens": count, "temperature": 0, "after": max(self.ends)}
        answer = await post(self.http, f"{self.path}/turns", body)
        assert answer["output_ids"] == expected_output(self.log, len(answer["output_ids"]), VOCABULARY)
        assert answer["start"] == before
        self._note(answer["turn"], answer["output_ids"])
        return cached(answer)

    async def leave_turn(self, ids: list[int], events: int) -> None:
        """Disconnect during an answer, then check that the session kept the tokens up to there."""
        body = {"input_ids": ids, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
        async with self.http.post(f"{self.path}/turns", json=body) as response:
            assert response.status == 200
            for _ in range(events):
                await response.content.readline()
        last = await self._settled(max(self.ends))
        self.log += ids
        assert (last["start"], last["input_tokens"]) == (len(self.log) - len(ids), len(ids))
        self._note(last["turn"], expected_output(self.log, last["output_tokens"], VOCABULARY))
        assert last["position"] == len(self.log)

    async def fork(self, turn: int) -> "Client":
        fork = await post(self.http, f"{self.path}/fork", {"turn": turn})
        await check_state(self.http, fork)
        ends = {number: end for number, end in self.ends.items() if number <= turn}
        return Client(self.http, fork["id"], self.log[: self.ends[turn]], ends)

    async def rewind(self, turn: int) -> None:
        back = await post(self.http, f"{self.path}/rewind", {"turn": turn})
        assert back["position"] == self.ends[turn]
        await check_state(self.http, back)
        self.log = self.log[: self.ends[turn]]
        self.ends = {number: end for number, end in self.ends.items() if number <= turn}

    def _note(self, turn: int, output: list[int]) -> None:
        self.log += output
        self.ends[turn] = len(self.log)

    async def _settled(self, after: int) -> Any:
        for _ in range(1000):
            async with self.http.get(self.path) as response:
                seen = await response.json()
            if seen["turn"] > after:
                return seen["turns"][-1]
            await asyncio.sleep(0.01)
        raise AssertionError(seen)


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def some(chance: random.Random) -> list[int]:
    return [chance.randrange(256) for _ in range(chance.randint(1, 20))]


@pytest.fixture(scope="module")
def roomy(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, "--state-slots", "200", "--kv-pages", "4000"]) as running:
        yield running


async def test_a_turn_computes_its_own_tokens_only(roomy: ServerProcess) -> None:
    chance = random.Random(1)
    async with aiohttp.ClientSession(roomy.url) as http:
        client = await Client.create(http)
        assert await client.turn(some(chance), 5) == 0
        for count in (1, 7, 30, 2, 60):
            known = len(client.log)
            # A turn that ends at max_tokens leaves its last token to the next turn, so that token is perhaps not
            # cached.
            assert await client.turn(some(chance), count) >= known - 1
        for number in (2, 4):
            fork = await client.fork(number)
            known = len(fork.log)
            assert await fork.turn(some(chance), 5) >= known - 1
            assert await fork.turn(some(chance), 5) >= known - 1
        await client.rewind(3)
        known = len(client.log)
        assert await client.turn(some(chance), 5) >= known - 1


async def test_an_abandoned_turn_is_continued(roomy: ServerProcess) -> None:
    chance = random.Random(2)
    async with aiohttp.ClientSession(roomy.url) as http:
        client = await Client.create(http)
        for events in (1, 20):
            await client.leave_turn(some(chance), events)
            await client.turn(some(chance), 3)


async def test_more_sessions_than_slots(checkpoint: Path) -> None:
    """Every turn is right, whichever states were evicted, and all slots and pages come home at the end."""
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(6)
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, "--state-slots", "8", "--kv-pages", "400"]) as server:
        async with aiohttp.ClientSession(server.url) as http:

            async def live(seed: int) -> None:
                chance = random.Random(seed)
                await gate.acquire()
                client = await Client.create(http)
                for _ in range(TURNS):
                    act = chance.choices(["turn", "leave", "fork", "rewind"], [6, 1, 2, 1])[0]
                    outcomes[act] += 1
                    if act == "turn":
                        outcomes["cached"] += await client.turn(some(chance), chance.randint(1, 20)) > 0
                    elif act == "leave":
                        await client.leave_turn(some(chance), chance.randint(1, 10))
                    elif act == "fork":
                        client = await client.fork(chance.choice(list(client.ends)))
                    else:
                        await client.rewind(chance.choice(list(client.ends)))
                gate.release()

            async with asyncio.TaskGroup() as tasks:
                for seed in range(60):
                    tasks.create_task(live(seed))

        def home() -> bool:
            info = server.get("/server_info")
            slots = info["gauges"]["slots"]
            return info["open_requests"] == 0 and slots["free"] + slots["cached"] == 8 and info["audit"] == []

        await asyncio.to_thread(server.wait_until, home)
    assert min(outcomes.values()) > 0 and outcomes["cached"] > 0


async def test_a_chat_with_the_bundled_model_resumes_from_its_states() -> None:
    with ServerProcess([*SERVE, "--memory", "256M"]) as server:
        async with aiohttp.ClientSession(server.url) as http:

            async def chat(cold: bool) -> list[Any]:
                path = f"/v1/sessions/{(await post(http, '/v1/sessions', {}))['id']}/turns"
                answers = []
                for text in ("My name is Anna.", "What is 3 plus 4?", "What is my name?"):
                    if cold:
                        await post(http, "/flush_cache", {})
                    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40}
                    answers.append(await post(http, path, body))
                return answers

            warm, cold = await chat(cold=False), await chat(cold=True)
    assert [answer["output_ids"] for answer in warm] == [answer["output_ids"] for answer in cold]
    for earlier, answer in pairwise(warm):
        assert answer["start"] == answer["history"] == earlier["position"]
        assert cached(answer) >= earlier["position"] - 1
    assert [cached(answer) for answer in cold] == [0, 0, 0]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_responses_resume_from_their_states_over_http_and_websocket() -> None:
    with ServerProcess([*SERVE, "--memory", "256M"]) as server:
        async with aiohttp.ClientSession(server.url) as http, http.ws_connect("/v1/responses") as socket:
            texts: dict[str, list[str]] = {"http": [], "websocket": [], "chat": []}
            for way in ("http", "websocket"):
                previous, known = None, 0
                for text in ("My name is Anna.", "What is 3 plus 4?", "What is my name?"):
                    body = {"input": text, "temperature": 0, "max_output_tokens": 40, "previous_response_id": previous}
                    response = await (post(http, "/v1/responses", body) if way == "http" else respond(socket, body))
                    usage = response["usage"]
                    assert usage["input_tokens_details"]["cached_tokens"] >= known - 1
                    texts[way].append(response["output"][0]["content"][0]["text"])
                    previous, known = response["id"], usage["total_tokens"]
            messages: list[Any] = []
            for text in ("My name is Anna.", "What is 3 plus 4?", "What is my name?"):
                messages.append({"role": "user", "content": text})
                body = {"messages": messages, "temperature": 0, "max_tokens": 40}
                messages.append((await post(http, "/v1/chat/completions", body))["choices"][0]["message"])
                texts["chat"].append(messages[-1]["content"])
            assert texts["http"] == texts["websocket"] == texts["chat"]
            # The server shuts down although a websocket is open.
            last, code = await asyncio.gather(socket.receive(60), asyncio.to_thread(server.stop))
            assert (last.type, last.data, code) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY, 0)


async def respond(socket: aiohttp.ClientWebSocketResponse, body: dict[str, Any]) -> Any:
    await socket.send_json({"type": "response.create", **body})
    while (event := await socket.receive_json(timeout=60))["type"] != "response.completed":
        assert event["type"].startswith("response."), event
    return event["response"]
