"""Talks: sessions as a seed draws them, with their turns and with commands during and between the turns."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from baton.actors.cache.below.limits import TierLimits

if TYPE_CHECKING:
    from tests.simulation.scenario import Ask

VOCABULARY = 61
STATE_BYTES, TOKEN_BYTES = 1000, 10
A_COPY = 30  # tokens of a typical copy; limits are a few times its size


@dataclass(frozen=True)
class Turn:
    """One turn of a session."""

    ask: "Ask"  # `ask.prompt`: the new tokens; `ask.at`: the delay after the end of the previous turn
    back: float | None = None  # share of the earlier turns: selects the turn to continue; None: the latest
    rewinds: bool = False  # remove the turns after the selected one, instead of branching


@dataclass(frozen=True)
class Command:
    """A command to a session, sent some time after its n-th turn has begun or ended."""

    turn: int
    moment: Literal["begun", "ended"]
    after: float
    what: Literal["suspend", "fork", "rewind", "close", "idle"]
    """"rewind" removes the last turn; "idle" closes the session, but only if no turn is running."""
    reopens: bool = False  # after a close, a new session continues with the remaining turns
    fork: str = ""  # the fork's name
    turns: tuple[Turn, ...] = ()  # the fork's turns


@dataclass(frozen=True)
class Talk:
    """One session."""

    id: str
    at: float
    salt: str
    turns: tuple[Turn, ...]
    commands: tuple[Command, ...] = ()


DrawAsk = Callable[[str, float], "Ask"]


def draw_talks(rng: random.Random, draw_ask: DrawAsk) -> tuple[Talk, ...]:
    """Draw one to eight sessions."""
    gap = rng.choice([1, 10, 60, 200])
    hasty = rng.choice([0.2, 0.8])
    talks, at = [], 0.0
    for index in range(rng.choice([1, 2, 3, 5, 8])):
        at += rng.expovariate(1 / gap)
        name = f"s{index}"
        turns = _draw_turns(rng, name, draw_ask, hasty, rng.randint(1, 5))
        commands = [
            _draw_command(rng, f"{name}f{n}", draw_ask, hasty, len(turns)) for n in range(rng.choice([0, 1, 3]))
        ]
        talks.append(Talk(name, at, rng.choice(["", "", "tenant"]), turns, tuple(commands)))
    return tuple(talks)


def draw_tiers(rng: random.Random, paged: bool) -> TierLimits:
    """Draw limits of host memory and disk that hold a few copies, or none."""
    one = TierLimits(0, 0, STATE_BYTES, TOKEN_BYTES if paged else 0, rng.choice([None, None, 0, 1, 3]))
    host = rng.choice([0, 1.2, 1.2, 3, 3, 12]) * one.memory_bytes(A_COPY)
    disk = rng.choice([0, 1.2, 3, 20]) * one.file_bytes(A_COPY)
    return replace(one, host_bytes=int(host), disk_bytes=int(disk))


def _draw_turns(rng: random.Random, name: str, draw_ask: DrawAsk, hasty: float, number: int) -> tuple[Turn, ...]:
    turns = []
    for index in range(number):
        pause = 0.0 if rng.random() < hasty else rng.choice([3, 30, 200]) * rng.random()
        ask = draw_ask(f"{name}.{index}", pause)
        if index:
            ask = replace(ask, prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 3, 8]))))
        ask = replace(ask, continues=None, reuses=False, max_tokens=min(ask.max_tokens, rng.choice([1, 4, 9])))
        back = rng.random() if index and rng.random() < 0.25 else None
        turns.append(Turn(ask, back, back is not None and rng.random() < 0.6))
    return tuple(turns)


def _draw_command(rng: random.Random, fork: str, draw_ask: DrawAsk, hasty: float, turns: int) -> Command:
    """Draw a command. fork: the name of the new session if the command is a fork."""
    what = rng.choice(["suspend", "suspend", "suspend", "fork", "fork", "rewind", "close", "idle"])
    forked = _draw_turns(rng, fork, draw_ask, hasty, rng.randint(1, 2)) if what == "fork" else ()
    return Command(
        turn=rng.randrange(turns),
        moment=rng.choice(["begun", "ended", "ended"]),
        after=rng.choice([0, 0, 5, 40, 200]) * rng.random(),
        what=what,
        reopens=rng.random() < 0.5,
        fork=fork,
        turns=forked,
    )
