"""Clients of a real server with the hash model: random requests whose every token is checked."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from baton.models.hash_definition import expected_output
from tests.api.server_process import ServerProcess

VOCAB = 256


def make_checkpoint(folder: Path, **config: Any) -> Path:
    """Make a checkpoint of the hash family with a byte tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    hash_family = {"model_type": "hash", "vocab_size": VOCAB, "chunk_size": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(hash_family | config))
    return folder


class Traffic:
    """Random requests, many of which share a beginning."""

    def __init__(self, url: str, seed: int, requests: int, at_once: int = 64, **fates: int) -> None:
        """fates: for each thing that may happen to a request, its relative frequency.

        finish: the client reads the whole answer. stream: the client reads the answer as events. leave: the client
        disconnects. abort: the request is ended by its id.
        """
        self._url = url
        self._requests = requests
        self._at_once = at_once
        self._fates = fates or {"finish": 6, "stream": 2, "leave": 1, "abort": 1}
        self._random = random.Random(seed)
        self._stems = [self._tokens(self._random.randint(1, 120)) for _ in range(6)]
        self.outcomes: Counter[str] = Counter()
        self.cached = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    async def run(self) -> None:
        gate = asyncio.Semaphore(self._at_once)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as session:

            async def one(number: int) -> None:
                async with gate:
                    self.outcomes[await self._request(session, number)] += 1

            async with asyncio.TaskGroup() as tasks:
                for number in range(self._requests):
                    tasks.create_task(one(number))

    async def _request(self, session: aiohttp.ClientSession, number: int) -> str:
        """Send one request and return how it ended: its finish reason, "leave", "503" or "unreachable"."""
        stem = self._random.choice(self._stems)
        prompt = stem[: self._random.randint(1, len(stem))] + self._tokens(self._random.randint(0, 30))
        count = self._random.randint(1, 40)
        fate = self._random.choices(list(self._fates), list(self._fates.values()))[0]
        body: dict[str, Any] = {
            "input_ids": prompt,
            "rid": f"r{number}",
            "sampling_params": {"max_new_tokens": count, "temperature": 0},
            "stream": fate != "finish",
        }
        try:
            response = await session.post("/generate", json=body)
        # The server closed its port before it accepted this connection, or closed it while it was idle.
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return "unreachable"
        async with response:
            if response.status == 503:
                return "503"
            assert response.status == 200, await response.text()
            if fate == "leave":
                await response.content.readline()
                return fate
            if fate == "abort":
                await (await session.post("/abort_request", json={"rid": f"r{number}"})).read()
            answer = await last_event(response) if fate != "finish" else await response.json()
        if "error" in answer:
            assert answer["error"]["code"] == "draining", answer
            return "503"
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


def wait_home(server: ServerProcess, url: str = "") -> None:
    """Wait until no request is open, and every slot and page is free or cached. url: of another server."""

    def home() -> bool:
        info = server.get("/server_info", url)
        slots, pages = info["gauges"]["slots"], info["gauges"]["pages"]
        astray = sum(slots.values()) - slots["free"] - slots["cached"] + pages["used"]
        return info["open_requests"] == 0 and astray == 0 and info["audit"] == []

    server.wait_until(home)


def troubles(server: ServerProcess) -> list[dict[str, Any]]:
    """Return the lines of the log that report errors."""
    return [line for line in server.log if line["level"] in ("error", "critical") or "exception" in line]
