"""Time to first token of a late turn of a long session, against an early turn and against reading the whole session."""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.server import Served

ANSWER_TOKENS = 8
MAX_WHOLE_ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    """The sizes of the sessions."""

    vocabulary: int
    turns: int  # which turn is the late turn, counted from 1
    history: int  # tokens before the late turn, answers included
    new: int  # new tokens of each measured turn


@dataclass(frozen=True)
class Session:
    """A session on the server, and all tokens of the session."""

    id: str
    log: list[int]


@dataclass(frozen=True)
class First:
    """The first token of a turn."""

    seconds: float  # time from the request until the token arrived
    token: int
    cached_tokens: int


class Client:
    """A client that grows sessions and measures turns, each in a fork, so that the session itself stays unchanged."""

    def __init__(self, http: aiohttp.ClientSession, vocabulary: int) -> None:
        self._http = http
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def draw(self, tokens: int) -> list[int]:
        """Return random tokens."""
        return [self._random.randrange(self._vocabulary) for _ in range(tokens)]

    async def grow(self, turns: int, history: int) -> Session:
        """Make a session of `turns` turns of equal size, `history` tokens in all."""
        session = Session((await self._post("/v1/sessions", {}))["id"], [])
        for turn in range(1, turns + 1):
            new = self.draw(history * turn // turns - len(session.log) - ANSWER_TOKENS)
            answer = await self._post(f"/v1/sessions/{session.id}/turns", turn_body(new))
            session.log.extend(new + answer["output_ids"])
        return session

    async def next_turn(self, session: Session, new: list[int]) -> First:
        """Measure the session's next turn. Raises RuntimeError if the turn did not resume from the session's state."""
        first = await self._turn(session, new)
        if first.cached_tokens < len(session.log) - 1:
            raise RuntimeError(f"only {first.cached_tokens} of {len(session.log)} tokens came from the cache")
        return first

    async def cold_turn(self, session: Session, new: list[int]) -> First:
        """Flush the cache, including the states of sessions, then measure the session's next turn."""
        await self._post("/flush_cache", {})
        return await self._turn(session, new)

    async def _turn(self, session: Session, new: list[int]) -> First:
        fork = f"/v1/sessions/{(await self._post(f'/v1/sessions/{session.id}/fork', {}))['id']}"
        began = time.perf_counter()
        async with self._http.post(f"{fork}/turns", json={**turn_body(new), "stream": True}) as answer:
            answer.raise_for_status()
            lines = [
                (time.perf_counter() - began, line) async for line in answer.content if line.startswith(b"data: {")
            ]
        await (await self._http.delete(fork)).read()
        events = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in lines]
        at, delta = next((at, event) for at, event in events if event["type"] == "turn.delta")
        return First(at, delta["output_ids"][0], cached_tokens(events[-1][1]))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(path, json=body, raise_for_status=True) as answer:
            return await answer.json()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=30, help="number of the late turn")
    parser.add_argument("--history", type=int, default=10_000, help="tokens before the late turn")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each measured turn")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    shape = Shape(workbench.config["vocab_size"], options.turns, options.history, options.new)
    with workbench.serve(Entry.parse("baton")) as served:
        asyncio.run(measure(served, workbench, shape, options.rounds or 15))


def turn_body(new: list[int]) -> dict[str, Any]:
    return {"input_ids": new, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}


def cached_tokens(ended: dict[str, Any]) -> int:
    return int(ended["usage"]["prompt_tokens_details"]["cached_tokens"])


async def measure(served: Served, workbench: Workbench, shape: Shape, rounds: int) -> None:
    async with aiohttp.ClientSession(served.url, timeout=aiohttp.ClientTimeout()) as http:
        client = Client(http, shape.vocabulary)
        late = await client.grow(shape.turns - 1, shape.history)
        early = await client.grow(1, shape.history // (shape.turns - 1))
        pairs = await alternate(client, early, late, shape.new, rounds)
        whole_rounds = min(rounds, MAX_WHOLE_ROUNDS)
        peer = await against_transformers(client, late, shape.new, whole_rounds, workbench)
        cold = [(await client.cold_turn(late, client.draw(shape.new))).seconds for _ in range(whole_rounds)]
    report(shape, pairs, peer, cold)


async def alternate(client: Client, early: Session, late: Session, new: int, rounds: int) -> list[tuple[float, float]]:
    """Return, for each round, the seconds of the early and of the late turn. A first round warms up and is dropped."""
    pairs = []
    for number in range(rounds + 1):
        order = (early, late) if number % 2 == 0 else (late, early)
        seconds = {session.id: (await client.next_turn(session, client.draw(new))).seconds for session in order}
        pairs.append((seconds[early.id], seconds[late.id]))
    return pairs[1:]


async def against_transformers(
    client: Client, session: Session, new: int, rounds: int, workbench: Workbench
) -> list[tuple[First, First]]:
    """Return, for each round, the first token of the session's next turn, and transformers' from the same tokens.

    The list is empty if transformers is not installed.
    """
    entry = Entry.parse("transformers")
    if workbench.missing(entry):
        return []
    with workbench.peer(entry) as transformers:
        await asyncio.to_thread(transformers.generate, [client.draw(new)], 1)
        pairs = []
        for _ in range(rounds):
            tokens = client.draw(new)
            ours = await client.next_turn(session, tokens)
            theirs = await asyncio.to_thread(transformers.generate, [session.log + tokens], 1)
            pairs.append((ours, First(theirs.seconds[0][0], theirs.tokens[0][0], 0)))
    return pairs


def report(shape: Shape, pairs: list[tuple[float, float]], peer: list[tuple[First, First]], cold: list[float]) -> None:
    early, late = [early for early, _ in pairs], [late for _, late in pairs]
    print(f"{f'{shape.new} new tokens, ms to first token':<44}{'median':>10}{'min':>10}{'max':>10}")
    show(f"turn 2, after {shape.history // (shape.turns - 1):,} tokens", early)
    show(f"turn {shape.turns}, after {shape.history:,} tokens", late)
    show("all tokens, nothing cached", cold)
    if peer:
        show("all tokens, transformers", [theirs.seconds for _, theirs in peer])
    compare(f"turn {shape.turns} / turn 2", [late / early for early, late in pairs])
    compare(f"nothing cached / turn {shape.turns}", [seconds / statistics.median(late) for seconds in cold])
    if not peer:
        print("transformers is not installed (scripts/bench peers --install transformers) and not compared")
        return
    compare(f"transformers / turn {shape.turns}", [theirs.seconds / ours.seconds for ours, theirs in peer])
    agreed = sum(ours.token == theirs.token for ours, theirs in peer)
    print(f"the first token is the same as transformers' in {agreed} of {len(peer)}")


def show(name: str, seconds: Sequence[float]) -> None:
    figures = [1e3 * figure for figure in (statistics.median(seconds), min(seconds), max(seconds))]
    print(f"{name:<44}" + "".join(f"{figure:>10,.1f}" for figure in figures))


def compare(name: str, ratios: Sequence[float]) -> None:
    """Print the median of the ratios and the range of their middle half."""
    ordered, count = sorted(ratios), len(ratios)
    low, high = ordered[count // 4], ordered[-1 - count // 4]
    print(f"{name}: {statistics.median(ratios):.3g} (median of {count}, half of them {low:.3g} to {high:.3g})")
