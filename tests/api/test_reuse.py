"""Tokens that stateless chats reuse over HTTP, as a share of those that they reuse with slots for all states."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.api.server_process import SERVE, ServerProcess

TURNS = 5
SYSTEM = "You are a patient assistant who answers in few words, and who never forgets what was said before."


@dataclass(frozen=True)
class Load:
    """A load of chats with five turns each, on a server with 64 slots."""

    chats: int
    least: float  # least reuse, as a share of the tokens reused without limits
    in_order: bool = True  # the chats take turns in a fixed order, not a random one
    system: str = ""
    host: bool = False  # the server keeps copies in host memory


LOADS = [
    Load(16, 0.97),
    Load(32, 0.95),
    Load(48, 0.93, in_order=False, system=SYSTEM),
    Load(58, 0.90),
    Load(100, 0.50, in_order=False),
    Load(100, 0.45),
    Load(100, 0.95, host=True),
    Load(100, 0.95, in_order=False, host=True),
]


async def chat_turn(session: aiohttp.ClientSession, messages: list[Any], rng: random.Random) -> int:
    """Ask a question, append its answer, and return the number of cached tokens."""
    words = " ".join(str(rng.randrange(10_000)) for _ in range(rng.randint(4, 12)))
    messages.append({"role": "user", "content": words})
    body = {"messages": messages, "temperature": 0, "max_tokens": rng.randint(8, 24)}
    async with session.post("/v1/chat/completions", json=body) as answered:
        assert answered.status == 200, await answered.text()
        answer = await answered.json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def reused(url: str, load: Load) -> int:
    """Run all chats and return the number of cached tokens."""
    rng = random.Random(7)
    chats: list[list[Any]] = [
        [{"role": "system", "content": load.system}] if load.system else [] for _ in range(load.chats)
    ]
    found = 0
    async with aiohttp.ClientSession(url) as session:
        for _ in range(TURNS):
            order = list(range(load.chats))
            if not load.in_order:
                rng.shuffle(order)
            for index in order:
                found += await chat_turn(session, chats[index], rng)
    return found


def share(load: Load) -> float:
    found = []
    for slots in (64, 2000):
        host = () if load.host and slots == 64 else ("--host-memory", "0")
        with ServerProcess((*SERVE, "--state-slots", str(slots), *host)) as server:
            found.append(asyncio.run(reused(server.url, load)))
    return found[0] / found[1]


def name(load: Load) -> str:
    order = "in turns" if load.in_order else "at random"
    return f"{load.chats} {order}" + ", one system prompt" * bool(load.system) + ", with host memory" * load.host


def check(load: Load) -> None:
    measured = share(load)
    print(f"{name(load)}: {measured:.1%}")
    assert measured >= load.least, name(load)


def test_16_chats_find_their_conversations_again_in_64_slots() -> None:
    check(LOADS[0])


@pytest.mark.soak
@pytest.mark.parametrize("load", LOADS, ids=name)
def test_chats_find_their_conversations_again_in_64_slots(load: Load) -> None:
    check(load)


async def seconds(session: aiohttp.ClientSession, prompts: Sequence[str]) -> tuple[float, list[int]]:
    """Send all prompts at once. Return the seconds until the last answer, and the cached tokens of each."""
    loop = asyncio.get_running_loop()

    async def ask(prompt: str) -> int:
        async with session.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as answered:
            assert answered.status == 200
            return int((await answered.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

    began = loop.time()
    found = await asyncio.gather(*map(ask, prompts))
    return loop.time() - began, found


def test_concurrent_requests_compute_a_common_prefix_once() -> None:
    async def scenario(url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            _, alone = await seconds(session, ["y" * 2000])
            _, found = await seconds(session, ["x" * 2000 + end * 20 for end in "abcd"])
            assert alone == [0] and sorted(found) == [0, 2000, 2000, 2000]
            for found in ([0], [39]):
                assert (await seconds(session, ["q" * 40]))[1] == found

    with ServerProcess() as server:
        asyncio.run(scenario(server.url))
