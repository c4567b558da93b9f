"""The seam to the device: what forward asks of it, in stream order, and what comes back."""

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from msgspec import Struct

from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request

Report = TypeVar("Report", bound=Ran | Transferred, covariant=True)


class WorkChunk(Struct, frozen=True, array_like=True):
    """Feed the tokens at indices [start, stop) of a row; sample behind the last of them if `samples`."""

    row: int
    start: int
    stop: int
    samples: bool


class WorkCheckpoint(Struct, frozen=True, array_like=True):
    """Copy the state of a row after exactly `position` tokens into `slot`."""

    row: int
    position: int
    slot: int


class WorkMask(Struct, frozen=True, array_like=True):
    """Which tokens a row may draw in this step: the words of a RowMask."""

    row: int
    words: bytes


class Work(Struct, frozen=True, array_like=True):
    """One step: the chunks, and rows that feed the token they sampled last (`decodes`, at `positions`)."""

    step: int
    chunks: list[WorkChunk]
    decodes: list[int]
    positions: list[int]
    checkpoints: list[WorkCheckpoint]
    masks: list[WorkMask] = []


class DeviceCalls(Protocol):
    """Each call is enqueued and returns at once; the order of calls is the order of execution.

    copies_aside: whether copies to and from host memory are the exception. Then each begins behind all calls before it,
    and none that follow wait for it: who uses its slot, its pages or its copy again has to hear first that it is over.
    """

    @property
    def copies_aside(self) -> bool: ...

    def clear(self, slot: int) -> None:
        """Zero a state slot."""

    def poison(self, slot: int) -> None:
        """Overwrite a state slot with what no state holds, so that a stale read of it shows."""

    def copy(self, source: int, target: int) -> None:
        """Copy a state slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page, all layers."""

    def drop(self, key: int) -> None:
        """Forget a copy in host memory."""

    def drop_all(self) -> None:
        """Forget every copy in host memory."""

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        """Set a row up: its tokens, sampling parameters, state slot and pages."""

    def extend_row(self, row: int, pages: list[int]) -> None:
        """Append pages to a row's table."""


class DeviceQueue(DeviceCalls, Protocol):
    """What forward asks. What comes of a step or a copy is delivered to its mailbox when that is over."""

    def run(self, work: Work) -> None:
        """Run a step; Ran follows."""

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        """Copy a state slot, and the KV of the first `position` tokens in `pages`, to host memory under `key`.

        Transferred follows.
        """

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> None:
        """Fill a state slot from host memory, and `pages`, those of page index `first_page` and on, with its KV.

        Transferred follows.
        """


class Device(DeviceCalls, Protocol):
    """What carries it out."""

    def launch(self, work: Work) -> "Pending[Ran]":
        """Enqueue a step."""
        ...

    def export(self, key: int, slot: int, pages: list[int], position: int) -> "Pending[Transferred]":
        """Enqueue the copy."""
        ...

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> "Pending[Transferred]":
        """Enqueue the copy."""
        ...


class Pending(Protocol[Report]):
    """What has been enqueued. It holds all that it needs: by then its rows may be other requests'."""

    def passed(self) -> bool:
        """Whether it is over, so that `collect` need not wait."""
        ...

    def collect(self) -> "Done[Report]":
        """Wait until it is over. Once. Raises what went wrong on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[Report]):
    """What is over, and so a Pending that was born done. seconds: that the device took."""

    report: Report
    seconds: float

    def passed(self) -> bool:
        return True

    def collect(self) -> Self:
        return self
