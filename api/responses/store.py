"""The store of responses, which later responses can continue. Age, number and bytes are limited.

An owner is the digest of an API key; requests find only the responses of their owner.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from baton.api import errors
from baton.api.errors import ApiError
from baton.api.responses.events import Transcript
from baton.api.sessions.by_owner import ByOwner, Changes, Key
from baton.api.sessions.log import Turn, backwards

MAX_RESPONSES = 10_000  # maximum stored responses that have ended


@dataclass(eq=False, kw_only=True)
class StoredResponse:
    """One response, linked to the chain of responses that it continues. The links stay when responses are deleted."""

    id: str
    transcript: Transcript
    previous: "StoredResponse | None" = None
    messages: list[dict[str, Any]]  # the response's input, without instructions
    base: Turn | None = None
    """The turn before this response, if this response is a session's turn. A rewind of the session keeps the link."""
    turn: Turn | None = None  # the turn of this response in its session, once it has ended
    stored: float = 0.0  # when the response ended, on the store's clock
    size: int = 0  # bytes of the response as JSON
    refcount: int = 0  # references from the store, lanes and later responses; while 0, `size` is not counted
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        """The response object as clients see it."""
        return self.transcript.body

    @property
    def running(self) -> bool:
        return not self.transcript.over

    def measure(self) -> None:
        """Compute `size`. Call this when the response has ended."""
        self.size = self.transcript.size + len(msgspec.json.encode(self.messages))

    @property
    def exchange(self) -> list[dict[str, Any]]:
        """The messages of the response's input, followed by its answer."""
        if self.transcript.prefill_only:
            return self.messages
        return [*self.messages, self.transcript.message]


def chain(last: StoredResponse | None) -> list[StoredResponse]:
    """Return the responses that `last` continues, oldest first, and `last`."""
    responses = []
    while last is not None:
        responses.append(last)
        last = last.previous
    return responses[::-1]


class ResponseStore:
    """Stored responses by owner and id. Running responses are never dropped.

    An ended response is dropped after the retention time, or earlier if a limit is exceeded: then the owner with the
    most bytes loses its oldest response. If the limit is that of bytes, the owner first loses its lanes' remembered
    responses (`remember`).
    """

    def __init__(self, retention: float, cap: int, clock: Callable[[], float] = time.monotonic) -> None:
        """retention: seconds for which an ended response is stored; 0 stores none.

        cap: maximum of `bytes`; above it responses are dropped.
        """
        self.enabled = retention > 0
        self.bytes = 0
        """Size of all ended responses that are stored or remembered, or that such responses continue, plus the size of
        all turns that these responses refer to. Each response and turn is counted once."""
        self._retention = retention
        self._cap = cap
        self._clock = clock
        self._running: dict[Key, StoredResponse] = {}
        self._ended: ByOwner[StoredResponse] = ByOwner()
        self._remembered: ByOwner[tuple[StoredResponse, Callable[[], None]]] = ByOwner()
        self._turns: Counter[Turn] = Counter()  # number of references to each turn
        self._bytes_of: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, key: Key) -> bool:
        return key in self._running or key in self._ended

    @property
    def keys(self) -> Collection[Key]:
        """The owners and ids of all responses."""
        return self._running.keys() | self._ended.keys

    @property
    def changes(self) -> Changes:
        return self._ended.changes

    @property
    def running(self) -> int:
        return len(self._running)

    def put(self, owner: bytes, response: StoredResponse) -> None:
        """Store a running response. It does not age or count in `bytes` until `mark_ended`."""
        self._running[owner, response.id] = response
        self.changes.note((owner, response.id))

    def mark_ended(self, owner: bytes, response: StoredResponse) -> None:
        """Note that a stored response has ended: from now on it ages and counts in `bytes`.

        Do nothing if the response was never stored, or was deleted.
        """
        if self._running.pop((owner, response.id), None) is None:
            return
        response.stored = self._clock()
        self._ended.put((owner, response.id), response)
        self._hold(owner, response)
        self._drop()

    def remember(self, owner: bytes, lane: str, response: StoredResponse, drop: Callable[[], None]) -> None:
        """Count the last response of a lane, and the responses that it continues, in `bytes` until `forget`.

        The response need not be stored.

        lane: a unique name of the lane. drop: makes the lane call `forget`, because a limit is exceeded; may be called
        at once.
        """
        self._remembered.put((owner, lane), (response, drop))
        self._hold(owner, response)
        self._drop()

    def forget(self, owner: bytes, lane: str) -> None:
        """Stop counting a lane's last response, if `remember` counted it."""
        if (remembered := self._remembered.pop((owner, lane))) is not None:
            self._release(owner, remembered[0])

    def find(self, owner: bytes, id: str) -> StoredResponse | None:
        self._drop()
        return self._running.get((owner, id)) or self._ended.get((owner, id))

    def get(self, owner: bytes, id: str) -> StoredResponse:
        """Return a stored response. Raises ApiError 404."""
        response = self.find(owner, id)
        if response is None:
            raise ApiError(404, f"there is no response {id!r}", "not_found_error", "response_id", "response_not_found")
        return response

    def item(self, owner: bytes, id: str, field: str) -> dict[str, Any]:
        """Return the output item `id` of a stored response. Raises ApiError 404.

        The id of an item contains the id of its response. field: the field that the error names.
        """
        response = self.find(owner, "resp_" + id.partition("_")[2].partition(".")[0])
        for item in response.body["output"] if response is not None else ():
            if item["id"] == id:
                return dict(item)
        message = f"no stored response has an item {id!r}"
        raise ApiError(404, message, "not_found_error", field, "item_not_found")

    def delete(self, owner: bytes, id: str) -> None:
        self._running.pop((owner, id), None)
        self.changes.note((owner, id))
        if (response := self._ended.pop((owner, id))) is not None:
            self._release(owner, response)

    def _drop(self) -> None:
        """Drop expired responses, and further responses while a limit is exceeded."""
        expired = self._clock() - self._retention
        while self._ended:
            owner, oldest = next(self._ended.items())
            if oldest.stored > expired:
                break
            self.delete(owner, oldest.id)
        while len(self._ended) > MAX_RESPONSES:
            owner = max(self._ended.owners, key=self._bytes_of.__getitem__)
            self.delete(owner, next(iter(self._ended.of(owner))).id)
        while self.bytes > self._cap and (owners := {*self._ended.owners, *self._remembered.owners}):
            owner = max(owners, key=self._bytes_of.__getitem__)
            if (remembered := next(iter(self._remembered.of(owner)), None)) is not None:
                _, drop = remembered
                drop()
            else:
                self.delete(owner, next(iter(self._ended.of(owner))).id)

    def _hold(self, owner: bytes, response: StoredResponse | None) -> None:
        """Add a reference to a response. The first one counts its size, and refers to its turns and to `previous`."""
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
    message = f"there is no response {id!r} to continue"
    return errors.bad_request(message, "previous_response_id", "previous_response_not_found")


RESPONSES = web.AppKey("responses", ResponseStore)
