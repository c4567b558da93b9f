"""A copy of a state below the pool: in which tiers it is, and in which queues of copies to write or evict next."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.radix import Node
from baton.actors.cache.worth.order import Order
from baton.actors.requests import Tier


class Presence(Enum):
    """The presence of a copy in one tier: host memory or disk."""

    ABSENT = auto()
    COMING = auto()  # being made, read or written
    PRESENT = auto()


@dataclass(eq=False, slots=True)
class StateCopy:
    """The copy of a state below the pool: in host memory, in a file, or both."""

    key: int  # the number under which forward and the disk's thread find the copy in host memory
    size: int  # bytes that the copy takes in host memory
    file_size: int  # bytes that the copy takes on disk
    first_page: int = 0  # the copy has no KV of the pages before this one, so only a grant that has them can use it
    host: Presence = Presence.ABSENT
    disk: Presence = Presence.ABSENT
    loans: int = 0  # number of Acquires that wait for this copy, and of grants whose slot is filled from it
    usable: bool = True  # whether requests may use the copy; if not, it is forgotten as soon as it is not `busy`
    unwritable: bool = False  # whether writing the copy's file has failed
    flushed: bool = False  # whether a flush has removed the copy from the tree, so that no request finds it

    @property
    def in_host(self) -> bool:
        return self.host is Presence.PRESENT

    @property
    def in_file(self) -> bool:
        return self.disk is Presence.PRESENT

    @property
    def lost(self) -> bool:
        """Whether the copy is neither in a tier nor on its way to host memory."""
        return self.host is Presence.ABSENT and self.disk is not Presence.PRESENT

    @property
    def tier(self) -> Tier:
        return "disk" if self.host is Presence.ABSENT else "host"

    @property
    def busy(self) -> bool:
        """Whether the copy is lent, or in transfer (being made, read or written), so that it must not be evicted."""
        return self.loans > 0 or Presence.COMING in (self.host, self.disk)


NOWHERE = StateCopy(0, 0, 0)


def copy_of(node: Node[StateCopy]) -> StateCopy:
    assert node.state is not None
    return node.state


class CopyQueues:
    """The queues of copies that can be evicted or written next, each in order of worth, the least first.

    A busy copy is in no queue, except that a lent copy may be in `unwritten`.
    """

    def __init__(self, order: Callable[[], Order[StateCopy]], changed: Callable[[Node[StateCopy]], None]) -> None:
        """changed: called after a copy has changed or was forgotten."""
        self._changed = changed
        self.in_both = order()  # copies that can be dropped from host memory at once, because they have files
        self.in_host_only = order()  # copies that must be written or lost to free their host memory
        self.unwritten = order()  # copies that can be written ahead
        self.in_file = order()  # copies whose files can be deleted to free disk space

    def sort(self, node: Node[StateCopy], used: bool = False) -> None:
        """Put the copy of this node into the right queues, after the copy has changed or was forgotten.

        used: whether the copy was used or its kind has changed, so that its position within the queues changes too
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
        self._changed(node)
