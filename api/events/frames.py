"""The events of GET /v1/events, by which a router knows an engine."""

import hashlib
from typing import Literal

from msgspec import Struct

from baton.actors.requests import Tier

Phase = Literal["loading", "ready", "draining"]


class Load(Struct, frozen=True, kw_only=True):
    """How much an engine has to do, and how fast it is."""

    rows: int = 0  # requests that run
    waiting: int = 0  # requests that wait for a row
    queue_seconds: float = 0.0  # time to compute the prompts that wait or are being computed, or to get a row if longer
    token_seconds: float = 0.0  # seconds for one prompt token; 0: not measured yet
    step_seconds: float = 0.0  # seconds of a step without prompts; 0: not measured yet
    slots: dict[str, int] = {}  # slots of the pool by use


class CachedDigest(Struct, frozen=True, array_like=True):
    """A cached state."""

    digest: str  # of its salt and tokens, 16 hexadecimal digits: actors/runtime/digests.py
    position: int  # number of these tokens
    tier: Tier


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="event", tag="snapshot"):
    """Everything that a router knows of an engine: the first event of a connection, and again after a restart."""

    sequence: int
    boot: str  # differs in each process
    name: str  # --engine-name
    model: str  # the model's name in the API
    role: str
    phase: Phase
    load: Load
    states: list[CachedDigest]
    names: list[str]  # of sessions and stored responses, see `name_of`


class Change(Struct, frozen=True, kw_only=True, tag_field="event", tag="change"):
    """The changes since the event before, whose `sequence` is one less; otherwise events are missing."""

    sequence: int
    phase: Phase
    load: Load
    states: list[CachedDigest] = []  # that are new, or in another tier now
    gone: list[str] = []  # digests of states
    names: list[str] = []  # that are new
    names_gone: list[str] = []


def name_of(owner: bytes, id: str) -> str:
    """Return the name of a session or stored response, from which neither owner nor id can be read.

    owner: the digest of its API key; empty without keys.
    """
    return hashlib.blake2b(id.encode(), key=owner[:64], digest_size=8).hexdigest()
