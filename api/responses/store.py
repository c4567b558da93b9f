"""Responses that later ones can go on from: kept for a time, at most so many, each for the owner that made it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from baton.api import errors
from baton.api.errors import ApiError
from baton.api.responses.events import Transcript
from baton.api.sessions.by_owner import ByOwner, Key
from baton.api.sessions.log import Turn, backwards

MAX_RESPONSES = 10_000


@dataclass(eq=False, kw_only=True)
class StoredResponse:
    """One response, and the chain of those that it goes on from, which it keeps although they may be deleted.

    messages: its input, without instructions. base, turn: if it is a turn of a session, the one that it goes on from,
    and its own once it has ended; they never change, whatever becomes of the session. refcount: how many keep it (the
    store, and responses that go on from it); its size counts while there are any.
    """

    id: str
    transcript: Transcript
    previous: "StoredResponse | None" = None
    messages: list[dict[str, Any]]
    base: Turn | None = None
    turn: Turn | None = None
    stored: float = 0.0
    size: int = 0
    refcount: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        """As clients see it."""
        return self.transcript.body

    @property
    def running(self) -> bool:
        return not self.transcript.over

    def measure(self) -> None:
        """To be called when it is over."""
        self.size = self.transcript.size + len(msgspec.json.encode(self.messages))

    @property
    def said(self) -> list[dict[str, Any]]:
        """Its input and its answer."""
        if self.transcript.prefill_only:
            return self.messages
        return [*self.messages, self.transcript.message]


def chain(last: StoredResponse | None) -> list[StoredResponse]:
    """Those up to `last`, oldest first."""
    responses = []
    while last is not None:
        responses.append(last)
        last = last.previous
    return responses[::-1]


class ResponseStore:
    """Stored responses by owner and id. Those that run are not dropped; of the others the oldest go first.

    For want of room they are the oldest of whoever holds most.

    retention: seconds for which an ended one is kept; 0 stores none. cap: most `bytes`. At most MAX_RESPONSES that have
    ended are kept. bytes: the JSON of all that have ended and are stored, or gone on from by such, and the logs of the
    turns that these hold, each counted once.
    """

    def __init__(self, retention: float, cap: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled = retention > 0
        self.bytes = 0
        self._retention = retention
        self._cap = cap
        self._clock = clock
        self._running: dict[Key, StoredResponse] = {}
        self._ended: ByOwner[StoredResponse] = ByOwner()
        self._turns: Counter[Turn] = Counter()
        self._bytes_of: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def running(self) -> int:
        return len(self._running)

    def put(self, owner: bytes, response: StoredResponse) -> None:
        """Store a response that runs. It has no age and does not count in `bytes` until it has ended."""
        self._running[owner, response.id] = response

    def mark_ended(self, owner: bytes, response: StoredResponse) -> None:
        """Note that a stored response has ended: from now on it has an age, and counts in `bytes`.

        Does nothing if it was not put here, or was deleted.
        """
        if self._running.pop((owner, response.id), None) is None:
            return
        response.stored = self._clock()
        self._ended.put((owner, response.id), response)
        self._hold(owner, response)
        self._drop()

    def find(self, owner: bytes, id: str) -> StoredResponse | None:
        self._drop()
        return self._running.get((owner, id)) or self._ended.get((owner, id))

    def get(self, owner: bytes, id: str) -> StoredResponse:
        """Raises 404."""
        response = self.find(owner, id)
        if response is None:
            raise ApiError(404, f"there is no response {id!r}", "not_found_error", "response_id", "response_not_found")
        return response

    def item(self, owner: bytes, id: str, field: str) -> dict[str, Any]:
        """An item of the output of a stored response, whose id is made from that one's. Raises 404 naming the field."""
        response = self.find(owner, "resp_" + id.partition("_")[2].partition(".")[0])
        for item in response.body["output"] if response is not None else ():
            if item["id"] == id:
                return dict(item)
        message = f"there is no item {id!r} in a response that is stored"
        raise ApiError(404, message, "not_found_error", field, "item_not_found")

    def delete(self, owner: bytes, id: str) -> None:
        self._running.pop((owner, id), None)
        if (response := self._ended.pop((owner, id))) is not None:
            self._release(owner, response)

    def _drop(self) -> None:
        expired = self._clock() - self._retention
        while self._ended:
            owner, oldest = next(self._ended.items())
            if oldest.stored > expired:
                if len(self._ended) <= MAX_RESPONSES and self.bytes <= self._cap:
                    return
                owner = max(self._ended.owners, key=self._bytes_of.__getitem__)
                oldest = next(iter(self._ended.of(owner)))
            self.delete(owner, oldest.id)

    def _hold(self, owner: bytes, response: StoredResponse | None) -> None:
        """Count it, and what it goes on from."""
        while response is not None:
            response.refcount += 1
            if response.refcount > 1:
                return
            self._count(owner, response.size)
            self._hold_turns(owner, response.turn or response.base)
            response = response.previous

    def _release(self, owner: bytes, response: StoredResponse | None) -> None:
        while response is not None:
            response.refcount -= 1
            if response.refcount > 0:
                return
            self._count(owner, -response.size)
            self._release_turns(owner, response.turn or response.base)
            response = response.previous

    def _count(self, owner: bytes, size: int) -> None:
        self.bytes += size
        self._bytes_of[owner] += size

    def _hold_turns(self, owner: bytes, head: Turn | None) -> None:
        for turn in backwards(head):
            self._turns[turn] += 1
            if self._turns[turn] > 1:
                return
            self._count(owner, turn.own_bytes)

    def _release_turns(self, owner: bytes, head: Turn | None) -> None:
        for turn in backwards(head):
            self._turns[turn] -= 1
            if self._turns[turn] > 0:
                return
            del self._turns[turn]
            self._count(owner, -turn.own_bytes)


def no_previous(id: str) -> ApiError:
    message = f"there is no response {id!r} to go on from"
    return errors.bad_request(message, "previous_response_id", "previous_response_not_found")


RESPONSES = web.AppKey("responses", ResponseStore)
