"""What clients will ask, and when: drawn from a seed, the same for every contender."""

import random
from dataclasses import dataclass
from typing import Literal

Workload = Literal["unique", "shared", "turns"]


@dataclass(frozen=True)
class Load:
    """requests: conversations in all. rate: how many begin a second, else `streams` run at any time.

    prompt: new tokens of each turn; shared: tokens that come before the first of them and are one of `prefixes`.
    """

    workload: Workload
    requests: int
    streams: int
    rate: float | None
    prompt: int
    answer: int
    shared: int
    prefixes: int
    turns: int


@dataclass(frozen=True)
class Conversation:
    """begins: seconds after the first; None: as soon as a stream is free. turns: what each adds to all before it."""

    begins: float | None
    turns: tuple[str, ...]


def draw(load: Load, vocabulary: int, seed: int) -> list[Conversation]:
    """Arrivals at a rate are a Poisson process."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        # The last token is no word of llama.cpp's vocabulary.
        return " ".join(f"t{rng.randrange(vocabulary - 1)}" for _ in range(count))

    prefixes = [words(load.shared) for _ in range(load.prefixes)] if load.workload == "shared" else []
    turns = load.turns if load.workload == "turns" else 1
    conversations, now = list[Conversation](), 0.0
    for _ in range(load.requests):
        asked = [words(load.prompt) for _ in range(turns)]
        if prefixes:
            asked[0] = f"{rng.choice(prefixes)} {asked[0]}"
        conversations.append(Conversation(now if load.rate else None, tuple(asked)))
        if load.rate:
            now += rng.expovariate(load.rate)
    return conversations
