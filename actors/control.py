"""Messages that are about no one request: sessions' names, flush, pause, drain, restart. None carries a lease."""

from msgspec import Struct

from baton.actors.requests import PauseMode, Tier
from baton.actors.tokens import Tokens


class Flush(Struct, tag=True, array_like=True):
    """api → cache: forget the tree, and the copies below it, files included; answered by Flushed."""

    ticket: int


class Cleared(Struct, tag=True, array_like=True):
    """disk → cache: all that was asked of it before this ticket is carried out."""

    ticket: int


class Flushed(Struct, tag=True, array_like=True):
    """cache → api."""

    ticket: int


class Name(Struct, tag=True, array_like=True):
    """api → cache: the session's name goes to the deepest state kept at or below the end of these tokens.

    Answered by Kept. While an account of the session is open this waits.
    """

    session: str
    salt: str
    tokens: Tokens


class Unname(Struct, tag=True, array_like=True):
    """api → cache: the session is closed; copies that no other name holds are dropped. Its name never comes again."""

    session: str


class Suspend(Struct, tag=True, array_like=True):
    """api → cache: move the session's state to the lowest tier there is; answered by Suspended."""

    ticket: int
    session: str


class Suspended(Struct, tag=True, array_like=True):
    """cache → api: where the session's state is now, and how many tokens it has consumed."""

    ticket: int
    tier: Tier
    position: int


class Kept(Struct, tag=True, array_like=True):
    """cache → api: the state that bears this session's name is, from now on, in this tier."""

    session: str
    tier: Tier
    position: int


class Speeds(Struct, tag=True, array_like=True):
    """device → cache, scheduler: seconds that something takes. 0: not known yet.

    operation: one of those that costs count, in a prompt; byte: to host memory or back. decode: a step without prompts.
    Beyond that a step in which rows decode beside prompts takes `beside`, however few tokens of them it has, and
    `prompt` for each.
    """

    operation: float = 0.0
    byte: float = 0.0
    decode: float = 0.0
    prompt: float = 0.0
    beside: float = 0.0


class Pause(Struct, tag=True, array_like=True):
    """api → scheduler: plan no more steps. Answered by Paused when none is under way.

    "in_place": what runs keeps its slot and pages; "retract": it goes back to the queue, and Paused waits for that.
    """

    ticket: int
    mode: PauseMode


class Paused(Struct, tag=True, array_like=True):
    """scheduler → api: so it is; or it was continued before."""

    ticket: int


class Continue(Struct, tag=True, array_like=True):
    """api → scheduler: go on."""


class Drain(Struct, tag=True, array_like=True):
    """One lap of the ring behind the last request: api → scheduler → forward → results → cache."""


class Drained(Struct, tag=True, array_like=True):
    """cache → api: the lap is complete; `leaks` names what was not home (empty when all is well)."""

    leaks: list[str]


class Restarted(Struct, tag=True, array_like=True):
    """supervision → api: the four actors were made anew; every open request is to be submitted again."""
