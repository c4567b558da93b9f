"""Acquires that the cache has not answered yet, and what each waits for."""

from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.radix import LowerCopy
from baton.actors.messages import Acquire
from baton.actors.requests import MissReason


class Wait(Enum):
    """The reason why an Acquire is not answered yet."""

    ALLOCATION = auto()  # a slot, or pages
    COPY = auto()  # a copy of its state that is on its way to host memory
    TOGETHER = auto()  # a state that another grant is computing


@dataclass(eq=False, slots=True)
class Parked:
    """An Acquire that is not answered yet."""

    acquire: Acquire
    awaits: LowerCopy | None = None  # the copy below the pool that it is to start from, on loan to it
    read: bool = False  # whether that copy was read from disk
    miss_reason: MissReason = ""  # "damaged" if the file that it waited for cannot be read
    overtaken: int = 0  # how many later Acquires were granted before it, because they wait for less
    leader: int | None = None  # the grant that is computing the state that it waits for
    waits_at: int = 0  # the position of that state
    leaders: int = 0  # how many grants it has waited for so far


class Waiting:
    """The Acquires that are not answered yet, in order of arrival."""

    def __init__(self) -> None:
        self._parked: dict[int, Parked] = {}

    def park(self, acquire: Acquire) -> None:
        self._parked[acquire.grant] = Parked(acquire, overtaken=acquire.overtaken)

    def forget(self, grant: int) -> Parked | None:
        """Remove and return an Acquire that is answered or cancelled; None if there is none."""
        return self._parked.pop(grant, None)

    def in_order(self) -> list[Parked]:
        """Return all of them, the most urgent first, those of equal priority in order of arrival."""
        return sorted(self._parked.values(), key=lambda parked: parked.acquire.priority)
