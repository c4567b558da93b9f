"""Responses that later ones can go on from: kept for a time, at most so many, each for the owner that made it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from api import errors
from api.errors import ApiError

MOST = 10_000


@dataclass(eq=False)
class StoredResponse:
    """One response, and the chain of those that it goes on from, which it keeps although they may be deleted.

    messages: its input, without instructions. body: as clients see it. answer: its text.
    """

    id: str
    previous: "StoredResponse | None"
    messages: list[dict[str, Any]]
    body: dict[str, Any] = field(default_factory=dict)
    answer: str = ""
    stored: float = 0.0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> bool:
        return bool(self.body["status"] == "in_progress")


def conversation(last: StoredResponse | None) -> list[dict[str, Any]]:
    """The messages up to `last` and its answer. Instructions are not handed on."""
    chain = []
    while last is not None:
        chain.append(last)
        last = last.previous
    messages: list[dict[str, Any]] = []
    for response in reversed(chain):
        messages += response.messages
        messages.append({"role": "assistant", "content": response.answer})
    return messages


class ResponseStore:
    """retention: seconds; with 0 nothing is stored. The oldest go first."""

    def __init__(self, retention: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled = retention > 0
        self._retention = retention
        self._clock = clock
        self._responses: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, owner: bytes, response: StoredResponse) -> None:
        response.stored = self._clock()
        self._responses[owner, response.id] = response
        self._drop()

    def find(self, owner: bytes, id: str) -> StoredResponse | None:
        self._drop()
        return self._responses.get((owner, id))

    def get(self, owner: bytes, id: str) -> StoredResponse:
        """Raises 404."""
        response = self.find(owner, id)
        if response is None:
            raise ApiError(404, f"there is no response {id!r}", "not_found_error", "response_id", "response_not_found")
        return response

    def delete(self, owner: bytes, id: str) -> None:
        self._responses.pop((owner, id), None)

    def _drop(self) -> None:
        expired = self._clock() - self._retention
        while self._responses:
            oldest = next(iter(self._responses.values()))
            if oldest.stored > expired and len(self._responses) <= MOST:
                return
            self._responses.popitem(last=False)


def no_previous(id: str) -> ApiError:
    message = f"there is no response {id!r} to go on from"
    return errors.bad_request(message, "previous_response_id", "previous_response_not_found")
