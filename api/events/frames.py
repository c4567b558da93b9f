"""The events of GET /v1/events: an engine's load, and the states, sessions and responses that it has."""

import hashlib
from typing import Literal

from msgspec import Struct

from baton.actors.requests import Tier

Phase = Literal["loading", "ready", "draining"]


class Load(Struct, frozen=True, kw_only=True):
    """The load of an engine, and its speed."""

    rows: int = 0  # running requests
    waiting: int = 0  # requests that wait for a row
    queue_seconds: float = 0.0  # time to compute the prompts of all requests, or until a row is free if that is longer
    token_seconds: float = 0.0  # seconds for one prompt token; 0: not measured yet
    step_seconds: float = 0.0  # seconds of a step without prompts; 0: not measured yet
    slots: dict[str, int] = {}  # number of slots by use: the names of `lease.Place`


class CachedDigest(Struct, frozen=True, array_like=True):
    """A cached state."""

    digest: str  # digest of salt and tokens (actors/runtime/digests.py) in 16 hexadecimal digits
    position: int  # number of tokens
    tier: Tier


class Snapshot(Struct, frozen=True, kw_only=True, tag_field="event", tag="snapshot"):
    """The whole state of an engine: the first event of a connection, sent again after a restart of the actors."""

    sequence: int
    boot: str  # random, new in each process
    name: str  # --engine-name, or HOST:PORT
    model: str  # the model's name in the API
    role: str
    phase: Phase
    load: Load
    states: list[CachedDigest]
    names: list[str]  # names of all sessions and stored responses (`name_of`)


class Change(Struct, frozen=True, kw_only=True, tag_field="event", tag="change"):
    """The changes since the event before. If that event's `sequence` is not one less, events are missing."""

    sequence: int
    phase: Phase
    load: Load
    states: list[CachedDigest] = []  # states that are new, or that have changed their tier
    gone: list[str] = []  # digests of states that are gone
    names: list[str] = []  # names of new sessions and responses
    names_gone: list[str] = []  # names of sessions and responses that are gone


def name_of(owner: bytes, id: str) -> str:
    """Return the name that routers know a session or stored response by. It reveals neither owner nor id.

    owner: the digest of the API key; empty without keys.
    """
    return hashlib.blake2b(id.encode(), key=owner[:64], digest_size=8).hexdigest()
