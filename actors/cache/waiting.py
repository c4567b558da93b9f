"""Acquires that the cache has not answered yet, and what each waits for."""

from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.radix import LowerCopy
from baton.actors.messages import Acquire
from baton.actors.requests import MissReason, Origin


class Wait(Enum):
    """The reason why an Acquire is not answered yet."""

    ALLOCATION = auto()  # a slot, or pages
    COPY = auto()  # a copy to resume from, which is on its way to host memory
    TOGETHER = auto()  # a state that another grant is computing
    PEER = auto()  # a state that a peer has or is computing


@dataclass(eq=False, slots=True)
class Parked:
    """An Acquire that is not answered yet."""

    acquire: Acquire
    awaits: LowerCopy | None = None  # the copy below the pool to resume from, lent to this Acquire
    origin: Origin = "host"  # where the copy in `awaits` was before it was in host memory
    miss_reason: MissReason = ""  # why a copy that this Acquire waited for did not come
    overtaken: int = 0  # how many later Acquires, which need less, were granted before this one
    leader: int | None = None  # id of the open grant that computes the state for which this Acquire waits
    waits_at: int = 0  # the position at which this Acquire waits for its leader's state
    leaders: int = 0  # how many leaders this Acquire has waited for so far


class Waiting:
    """The Acquires that are not answered yet, in order of arrival."""

    def __init__(self) -> None:
        self._parked: dict[int, Parked] = {}

    def park(self, acquire: Acquire) -> None:
        self._parked[acquire.grant] = Parked(acquire, overtaken=acquire.overtaken)

    def forget(self, grant: int) -> Parked | None:
        """Remove and return the Acquire of this grant, which is answered or cancelled; None if none is parked."""
        return self._parked.pop(grant, None)

    def in_order(self) -> list[Parked]:
        """Return all parked Acquires, the most urgent first, and in order of arrival at equal priority."""
        return sorted(self._parked.values(), key=lambda parked: parked.acquire.priority)
