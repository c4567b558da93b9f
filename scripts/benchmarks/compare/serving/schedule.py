"""The requests of a round and their times, drawn from a seed; they are the same for every contender."""

import random
from dataclasses import dataclass
from typing import Literal

Workload = Literal["unique", "shared", "turns"]


@dataclass(frozen=True)
class Load:
    """The load of one round."""

    workload: Workload
    requests: int  # number of conversations
    streams: int  # concurrent conversations, if there is no `rate`
    rate: float | None  # conversations that begin per second
    prompt: int  # new tokens of each turn
    answer: int  # tokens of each answer
    shared: int  # tokens of a shared prefix, which precedes the first prompt of a conversation
    prefixes: int  # number of different shared prefixes
    turns: int  # turns of a conversation


@dataclass(frozen=True)
class Conversation:
    """The prompts of one conversation."""

    begins: float | None  # seconds after the first conversation; None: as soon as a stream is free
    turns: tuple[str, ...]  # text that each turn appends to the conversation


def draw(load: Load, vocabulary: int, seed: int) -> list[Conversation]:
    """Draw the conversations of a round. With a rate, arrivals are a Poisson process."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        # The last token is left out: llama.cpp's vocabulary has no word for it (peers/write_gguf.py).
        return " ".join(f"t{rng.randrange(vocabulary - 1)}" for _ in range(count))

    prefixes = [words(load.shared) for _ in range(load.prefixes)] if load.workload == "shared" else []
    turns = load.turns if load.workload == "turns" else 1
    conversations, now = list[Conversation](), 0.0
    for _ in range(load.requests):
        prompts = [words(load.prompt) for _ in range(turns)]
        if prefixes:
            prompts[0] = f"{rng.choice(prefixes)} {prompts[0]}"
        conversations.append(Conversation(now if load.rate else None, tuple(prompts)))
        if load.rate:
            now += rng.expovariate(load.rate)
    return conversations
