"""A copy of a state below the pool: where it is, and which queues it stands in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.radix import Node
from baton.actors.cache.worth.order import Order
from baton.actors.requests import Tier


class Presence(Enum):
    """Whether a copy is in one tier."""

    ABSENT = auto()
    COMING = auto()  # being made, read or written
    PRESENT = auto()


@dataclass(eq=False, slots=True)
class StateCopy:
    """A state below the pool: in host memory, in a file, or both."""

    key: int  # under which forward and the disk's thread know the copy in host memory
    size: int  # bytes of host memory
    file_size: int  # bytes on disk
    host: Presence = Presence.ABSENT
    disk: Presence = Presence.ABSENT
    loans: int = 0  # requests that wait for it or are filled from it
    usable: bool = True  # whether it may be used again; otherwise it goes as soon as nothing is under way with it
    unwritable: bool = False  # whether writing its file has failed
    flushed: bool = False  # whether it was flushed: it is no longer in the tree, and is not to be found

    @property
    def in_host(self) -> bool:
        return self.host is Presence.PRESENT

    @property
    def in_file(self) -> bool:
        return self.disk is Presence.PRESENT

    @property
    def lost(self) -> bool:
        """Whether it is neither in a tier nor on its way to host memory."""
        return self.host is Presence.ABSENT and self.disk is not Presence.PRESENT

    @property
    def tier(self) -> Tier:
        return "disk" if self.host is Presence.ABSENT else "host"

    @property
    def busy(self) -> bool:
        """Whether something is under way with it, so that it must not go."""
        return self.loans > 0 or Presence.COMING in (self.host, self.disk)


NOWHERE = StateCopy(0, 0, 0)


def copy_of(node: Node[StateCopy]) -> StateCopy:
    assert node.state is not None
    return node.state


class CopyQueues:
    """The queues that copies stand in, each in order of worth, the least first.

    A busy copy is in none of them, except that a lent one can be written ahead.
    """

    def __init__(self, order: Callable[[], Order[StateCopy]]) -> None:
        self.in_both = order()  # can leave host memory at once, as it has a file
        self.in_host_only = order()  # can make room in host memory by being written or lost
        self.unwritten = order()  # can be written ahead
        self.in_file = order()  # can make room on disk

    def sort(self, node: Node[StateCopy], used: bool = False) -> None:
        """Put the copy of this node into the right queues, after any change of it or when it is gone.

        used: it was used, or its kind has changed, so its place within the queues changes too.
        """
        copy = node.state if node.state is not None and not node.state.flushed else NOWHERE
        unwritten = copy.in_host and copy.disk is Presence.ABSENT
        for queue, belongs in (
            (self.in_both, copy.in_host and copy.in_file and not copy.busy),
            (self.in_host_only, unwritten and not copy.busy),
            (self.unwritten, unwritten and copy.usable and not copy.unwritable),
            (self.in_file, copy.in_file and not copy.busy),
        ):
            if belongs != (node in queue) or (belongs and used):
                queue.put(node, belongs)
