"""The seam to the tiers below the pool of state slots, and a plain implementation without any."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from baton.actors.actor import Send
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.radix import LowerCopy, Node, RadixTree
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import (
    Cleared,
    Exported,
    Flushed,
    Kept,
    Loaded,
    Name,
    Speeds,
    Suspend,
    Suspended,
    Unmade,
    Unname,
    Written,
)
from baton.actors.requests import Origin

TierMessage: TypeAlias = Exported | Unmade | Written | Loaded | Cleared | Speeds | Name | Unname | Suspend


class Tiers(Protocol):
    """The tiers below the pool of state slots: copies of states in host memory and files, and the sessions' names.

    A state goes down when the cache evicts it (`evict`), and comes back when an Acquire finds its copy (`copy_for`)
    and a grant's slot is filled from it (`lend`, `end_loan`). A session's name protects its state: the state is copied
    before its slot is used again. So names belong to the tiers; without them a name protects nothing.

    The slot and pages of a state on its way down can be had again only when the copy is made. Until then `exporting`
    is true: the cache waits for them, begins no second copy, and reports no row as starved.
    """

    slot_reserve: int  # free slots that checkpoints leave to requests, as evicting a state that is copied takes a while

    @property
    def counters(self) -> Counter[str]:
        """Events below the pool by name, for the metrics."""

    @property
    def exporting(self) -> bool:
        """Whether slots or pages are about to come back because a state is being copied down."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and no command waits. `Drained` waits for this."""

    def figures(self) -> dict[str, int]:
        """Return the number of copies and the bytes that they take: "host", "disk", "host_bytes", "disk_bytes"."""

    # Messages and the end of a turn of the actor

    def receive(self, message: TierMessage) -> None:
        """Take in a report of forward, the disk or the device, or a command about a session's name."""

    def act(self) -> None:
        """Carry out commands and move states down as limits demand. Called first in the cache's `act`."""

    def keep_slots_free(self) -> None:
        """Begin to copy down the next states to go, ahead of need. Called after all Acquires were looked at."""

    def drain(self) -> None:
        """Begin to write everything that has to survive the process."""

    # Down

    def is_to_copy(self, node: Node[Lease]) -> bool:
        """Return whether evicting this state makes a copy first, so that its slot is not free at once."""

    def evict(self, node: Node[Lease]) -> None:
        """Take a state that is not lent out of its slot, at once or when its copy is made."""

    def flush(self, nodes: Iterable[Node[Lease]]) -> None:
        """Forget every copy. nodes: those whose states are forgotten with them."""

    def finish_flush(self, ticket: int) -> None:
        """Send Flushed(ticket) as soon as nothing from before the flush is left below."""

    # Up

    def copy_for(self, parked: Parked, position: int) -> LowerCopy | None:
        """Return the copy to resume from, if one lies beyond `position`; lend it to `parked`, and begin to load it."""

    def release(self, parked: Parked) -> None:
        """End the loan that `copy_for` gave to a parked Acquire, which is answered or cancelled."""

    def is_ready(self, copy: LowerCopy) -> bool:
        """Return whether a slot can be filled from this copy now."""

    def key(self, copy: LowerCopy) -> int:
        """Return the key under which forward finds this copy."""

    def lend(self, copy: LowerCopy) -> None:
        """Lend a copy to a grant whose slot is filled from it."""

    def end_loan(self, copy: LowerCopy) -> None:
        """End the loan to a grant: its slot is filled, or never will be."""

    def loan_ended(self, node: Node[Lease]) -> None:
        """Note that a loan of this state of the pool has ended, so that it may go down."""

    # Sessions

    def begin_turn(self, session: str, origin: Origin) -> None:
        """Note that a grant of this session is open. Commands about the session wait until it ends."""

    def end_turn(self, session: str, last: Node[Lease] | None) -> None:
        """Note that a grant of this session is closed. last: the deepest state of its path, if any is left."""

    def bind(self, session: str, node: Node[Lease]) -> None:
        """Put the name of an open session on this state."""

    def take_name(self, session: str, node: Node[Lease]) -> bool:
        """Take the session's name off a state that moves to the session's own turn; return whether it had it."""


class NoTiers:
    """Nothing below the pool: an evicted state is lost, and a session resumes from what the tree still has."""

    def __init__(self, send: Send, ledger: Ledger, tree: RadixTree[Lease], eviction: EvictionPolicy) -> None:
        self.slot_reserve = 0
        self._send, self._ledger, self._tree, self._eviction = send, ledger, tree, eviction

    @property
    def counters(self) -> Counter[str]:
        return Counter()

    @property
    def exporting(self) -> bool:
        return False

    @property
    def idle(self) -> bool:
        return True

    def figures(self) -> dict[str, int]:
        return dict.fromkeys(("host", "disk", "host_bytes", "disk_bytes"), 0)

    def receive(self, message: TierMessage) -> None:
        match message:
            case Name(session):
                self._send("api", Kept(session, "tokens", 0))
            case Suspend(ticket):
                self._send("api", Suspended(ticket, "tokens", 0))
            case Unname() | Speeds():
                pass
            case _:
                raise TypeError(f"there are no tiers, and {message!r} was received")

    def act(self) -> None:
        pass

    def keep_slots_free(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def is_to_copy(self, node: Node[Lease]) -> bool:
        return False

    def evict(self, node: Node[Lease]) -> None:
        self._eviction.evicted(node)
        node.evicted = True
        self._ledger.free(self._tree.take_state(node))

    def flush(self, nodes: Iterable[Node[Lease]]) -> None:
        pass

    def finish_flush(self, ticket: int) -> None:
        self._send("api", Flushed(ticket))

    def copy_for(self, parked: Parked, position: int) -> LowerCopy | None:
        return None

    def release(self, parked: Parked) -> None:
        pass

    def is_ready(self, copy: LowerCopy) -> bool:
        raise AssertionError("there are no copies")

    def key(self, copy: LowerCopy) -> int:
        raise AssertionError("there are no copies")

    def lend(self, copy: LowerCopy) -> None:
        raise AssertionError("there are no copies")

    def end_loan(self, copy: LowerCopy) -> None:
        raise AssertionError("there are no copies")

    def loan_ended(self, node: Node[Lease]) -> None:
        pass

    def begin_turn(self, session: str, origin: Origin) -> None:
        pass

    def end_turn(self, session: str, last: Node[Lease] | None) -> None:
        pass

    def bind(self, session: str, node: Node[Lease]) -> None:
        pass

    def take_name(self, session: str, node: Node[Lease]) -> bool:
        return False
