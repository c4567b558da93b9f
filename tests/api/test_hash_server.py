"""The hash model in a real server: threads, HTTP, disconnects, aborts, small pools; every token is checked."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from models.hash_definition import expected_output
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio

VOCAB = 256
SLOTS, PAGES = 12, 160
SMALL = [
    "--state-slots", str(SLOTS), "--kv-pages", str(PAGES), "--page-size", "4", "--max-running", "8",
    "--step-tokens", "64", "--max-model-len", "200", "--track-interval", "16",
]  # fmt: skip
REQUESTS = 500
AT_ONCE = 64
ROUNDS = 2
GROWTH_MIB = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the hash family, with a tokenizer of single bytes."""
    folder: Path = tmp_path_factory.mktemp("hash")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "hash", "vocab_size": VOCAB, "chunk_size": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=[[], ["--no-overlap"], ["--codec-check"]], ids=["overlap", "no-overlap", "codec"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, *request.param]) as running:
        yield running
    assert running.log[-1]["event"] == "drained"
    assert not [line for line in running.log if line["level"] in ("error", "critical")]


class Traffic:
    """Random requests, many of which share a beginning; some are aborted, some of their clients go away."""

    def __init__(self, url: str, seed: int, requests: int = REQUESTS) -> None:
        self._url = url
        self._requests = requests
        self._random = random.Random(seed)
        self._stems = [self._tokens(self._random.randint(1, 120)) for _ in range(6)]
        self.outcomes: Counter[str] = Counter()
        self.cached = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    async def run(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with aiohttp.ClientSession(self._url) as session:

            async def one(number: int) -> None:
                async with gate:
                    self.outcomes[await self._request(session, number)] += 1

            async with asyncio.TaskGroup() as tasks:
                for number in range(self._requests):
                    tasks.create_task(one(number))

    async def _request(self, session: aiohttp.ClientSession, number: int) -> str:
        stem = self._random.choice(self._stems)
        prompt = stem[: self._random.randint(1, len(stem))] + self._tokens(self._random.randint(0, 30))
        count = self._random.randint(1, 40)
        fate = self._random.choices(["finish", "stream", "leave", "abort"], [6, 2, 1, 1])[0]
        body: dict[str, Any] = {
            "input_ids": prompt,
            "rid": f"r{number}",
            "sampling_params": {"max_new_tokens": count, "temperature": 0},
            "stream": fate != "finish",
        }
        async with session.post("/generate", json=body) as response:
            assert response.status == 200, await response.text()
            if fate == "leave":
                await response.content.readline()
                return fate
            if fate == "abort":
                await (await session.post("/abort_request", json={"rid": f"r{number}"})).read()
            answer = await last_event(response) if fate != "finish" else await response.json()
        kind = answer["meta_info"]["finish_reason"]["type"]
        expected = expected_output(prompt, len(answer["output_ids"]), VOCAB)
        assert answer["output_ids"] == expected, (number, kind, len(prompt))
        assert (kind == "abort" and fate == "abort") or len(expected) == count
        self.cached += answer["meta_info"]["cached_tokens"]
        return str(kind)


async def last_event(response: aiohttp.ClientResponse) -> Any:
    events = (await response.read()).removesuffix(b"\n\n").split(b"\n\n")
    assert events[-1] == b"data: [DONE]"
    return json.loads(events[-2][len(b"data: ") :])


async def test_every_token_is_right_and_every_slot_comes_home(server: ServerProcess) -> None:
    resident = []
    for seed in range(ROUNDS):
        traffic = Traffic(server.url, seed)
        await traffic.run()
        assert traffic.outcomes["length"] > REQUESTS / 2 and traffic.outcomes["leave"] > 0
        assert traffic.cached > 0
        await asyncio.to_thread(wait_home, server)
        resident.append(server.resident_mib())
    assert resident[-1] - resident[0] < GROWTH_MIB


def wait_home(server: ServerProcess) -> None:
    """Until nothing is open, and every slot and page is free or cached."""

    def home() -> bool:
        info = server.get("/server_info")
        slots, pages = info["gauges"]["slots"], info["gauges"]["pages"]
        return (
            info["open_requests"] == 0
            and slots["free"] + slots["cached"] == SLOTS
            and pages["free"] + pages["cached"] == PAGES
            and info["audit"] == []
        )

    server.wait_until(home)


async def test_the_ledger_can_be_rebuilt_from_the_log(checkpoint: Path) -> None:
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, "--log-level", "debug"]) as server:
        await Traffic(server.url, seed=11, requests=60).run()
        await asyncio.to_thread(wait_home, server)
        expected = server.get("/server_info")["gauges"]["slots"]
        mark = server.get("/server_info")["lease_moves"]
        server.wait_until(lambda: sum(line["event"] == "lease" for line in server.log) >= sum(mark.values()))
        moves = [line for line in server.log if line["event"] == "lease"]
    places = dict.fromkeys(range(SLOTS), "free")
    generations = dict.fromkeys(range(SLOTS), 0)
    for move in moves:
        slot = move["slot"]
        assert move["generation"] == generations[slot] + (places[slot] == "free")
        places[slot], generations[slot] = move["place"], move["generation"]
    rebuilt = Counter(places.values())
    assert {place: rebuilt[place] for place in expected} == expected
