"""A copy of a state below the pool: where it is, and what it is in question for."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.radix import Node
from baton.actors.cache.worth.order import Order
from baton.actors.requests import Tier


class Presence(Enum):
    ABSENT = auto()
    COMING = auto()
    PRESENT = auto()


@dataclass(eq=False, slots=True)
class StateCopy:
    """A state that left the pool: in host memory under `key`, in a file, or both; the sizes in bytes are its own.

    loans: requests that wait for it or are filled from it. wanted: False when no session can go on from it any more;
    then it goes as soon as nothing is under way with it. unwritable: a write of it has failed. flushed: it is not to be
    found any more.
    """

    key: int
    size: int
    file_size: int
    host: Presence = Presence.ABSENT
    disk: Presence = Presence.ABSENT
    loans: int = 0
    wanted: bool = True
    unwritable: bool = False
    flushed: bool = False

    @property
    def in_host(self) -> bool:
        return self.host is Presence.PRESENT

    @property
    def in_file(self) -> bool:
        return self.disk is Presence.PRESENT

    @property
    def lost(self) -> bool:
        """Whether nothing can come of it: it is nowhere, and not on its way to host memory."""
        return self.host is Presence.ABSENT and self.disk is not Presence.PRESENT

    @property
    def tier(self) -> Tier:
        return "disk" if self.host is Presence.ABSENT else "host"

    @property
    def busy(self) -> bool:
        return self.loans > 0 or Presence.COMING in (self.host, self.disk)


NOWHERE = StateCopy(0, 0, 0)


def copy_of(node: Node[StateCopy]) -> StateCopy:
    assert node.state is not None
    return node.state


class CopyQueues:
    """What each copy is in question for, as it stands; of each the one that is worth least comes first.

    in_both: to leave host memory at once. in_host_only: to make room there, being written or lost. unwritten: to be
    written ahead. in_file: to make room on disk. With those that are busy nothing of this can be done, but one that is
    lent can be written ahead.
    """

    def __init__(self, order: Callable[[], Order[StateCopy]]) -> None:
        self.in_both, self.in_host_only, self.unwritten, self.in_file = order(), order(), order(), order()

    def sort(self, node: Node[StateCopy], used: bool = False) -> None:
        """To be called after any change of the copy at this node, and when there is none any more.

        used: it was used, or is of another kind.
        """
        copy = node.state if node.state is not None and not node.state.flushed else NOWHERE
        unwritten = copy.in_host and copy.disk is Presence.ABSENT
        for queue, belongs in (
            (self.in_both, copy.in_host and copy.in_file and not copy.busy),
            (self.in_host_only, unwritten and not copy.busy),
            (self.unwritten, unwritten and copy.wanted and not copy.unwritable),
            (self.in_file, copy.in_file and not copy.busy),
        ):
            if belongs != (node in queue) or (belongs and used):
                queue.put(node, belongs)
