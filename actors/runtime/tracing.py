"""The trace that a message belongs to."""

from collections.abc import Callable
from typing import TypeAlias, get_args

from baton.actors.messages import (
    Abort,
    Acquire,
    Admit,
    Admitted,
    Cancel,
    Closed,
    Copied,
    Donate,
    Ended,
    Filled,
    Free,
    Granted,
    Mark,
    Message,
    Over,
    Passed,
    Refused,
    Requeue,
    Retire,
    Retired,
    Return,
    SaveFromReq,
    Spare,
    Submit,
    Transferred,
    Want,
)

OfGrant: TypeAlias = (
    Granted | Spare | Return | Retired | Donate | SaveFromReq | Cancel | Want | Mark | Passed | Retire | Copied
    | Filled
)  # fmt: skip


class Traces:
    """The traces of all open requests and grants.

    A message that names a request or a grant belongs to its trace. A message that names neither inherits `current`, the
    trace of the message being received. While an actor acts, `current` is empty: what it sends from `act` has no trace.

    queued: returns the trace of a request whose Acquire is being sent, given its grant id.
    """

    def __init__(self, queued: Callable[[int], str]) -> None:
        self.current = ""
        self._queued = queued
        self._grants: dict[int, str] = {}
        self._requests: dict[str, str] = {}
        self._readers: dict[type, Callable[..., str]] = {
            **dict.fromkeys(get_args(OfGrant), self._of_grant),
            **dict.fromkeys((Closed, Refused), self._of_closed_grant),
            **dict.fromkeys((Submit, Requeue), self._of_new_request),
            **dict.fromkeys((Over, Ended), self._of_ended_request),
            Admit: self._of_admit,
            Admitted: self._of_admitted,
            Acquire: self._of_acquire,
            Abort: self._of_abort,
            Free: self._of_free,
            Transferred: self._of_transferred,
        }

    def of(self, message: Message) -> str:
        """Return the trace of a message that is being sent; "" if it has none."""
        read = self._readers.get(type(message))
        return self.current if read is None else read(message)

    def _of_grant(self, message: OfGrant) -> str:
        return self._grants.get(message.grant, self.current)

    def _of_closed_grant(self, message: Closed | Refused) -> str:
        return self._grants.pop(message.grant, self.current)

    def _of_new_request(self, message: Submit | Requeue) -> str:
        trace = self._requests[message.request.id] = message.request.trace
        return trace

    def _of_ended_request(self, message: Over | Ended) -> str:
        return self._requests.pop(message.request, self.current)

    def _of_admit(self, message: Admit) -> str:
        trace = self._grants[message.grant] = message.request.trace
        return trace

    def _of_admitted(self, message: Admitted) -> str:
        return message.request.trace

    def _of_acquire(self, message: Acquire) -> str:
        trace = self._grants[message.grant] = self._queued(message.grant)
        return trace

    def _of_abort(self, message: Abort) -> str:
        return self._requests.get(message.request, self.current)

    def _of_free(self, message: Free) -> str:
        return self.current if message.closes_grant is None else self._grants.get(message.closes_grant, self.current)

    def _of_transferred(self, message: Transferred) -> str:
        return self.current if message.grant is None else self._grants.get(message.grant, self.current)
