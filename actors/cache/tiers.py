"""The interface to the tiers below the pool of state slots, and a plain implementation without any tier."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from baton.actors.actor import Send
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.radix import LowerCopy, Match, Node, RadixTree
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import Flushed, Kept, Message, Name, Speeds, Suspend, Suspended, Unname
from baton.actors.requests import Origin


class Tiers(Protocol):
    """The tiers below the pool of state slots: copies of states in host memory and files, and the sessions' names.

    A state is copied when the cache evicts it (`evict`). The copy is used when an Acquire matches it (`copy_for`) and a
    grant's slot is filled from it (`lend`, `end_loan`). A session's name protects its state: the state is copied before
    its slot is used again. So names belong to the tiers: without tiers a name protects nothing.

    While a state is being copied out of the pool, its slot and pages are not free, and `exporting` is true. Until the
    copy is made, the cache waits for slot and pages, begins no second copy, and reports no row as starved.
    """

    slot_reserve: int  # free slots that checkpoints leave to requests, because an eviction with a copy takes time

    @property
    def counters(self) -> Counter[str]:
        """Counts of events below the pool, by name of the event, for the metrics."""

    @property
    def exporting(self) -> bool:
        """Whether a state is being copied out of the pool, so that its slot and pages will soon be free."""

    @property
    def idle(self) -> bool:
        """Whether no copy, read or write is in progress and no command waits. `Drained` is sent only then."""

    def figures(self) -> dict[str, int]:
        """Return the number of copies ("host", "disk") and of their bytes ("host_bytes", "disk_bytes") in each tier."""

    # Messages, and the cache's `act`

    def receive(self, message: Message) -> None:
        """Handle a report from forward, the disk, the device or the peers, or a command about a session's name.

        Raises TypeError for any other message: the cache passes on all that it does not handle itself.
        """

    def act(self) -> None:
        """Carry out commands, and evict or write states as the limits demand. Called first in the cache's `act`."""

    def keep_slots_free(self) -> None:
        """Evict, ahead of need, states that must be copied first. Called after the Acquires were answered."""

    def drain(self) -> None:
        """Begin to write everything that has to survive the process."""

    # Down

    def is_to_copy(self, node: Node[Lease]) -> bool:
        """Return whether evicting this state makes a copy first, so that its slot is not free at once."""

    def evict(self, node: Node[Lease]) -> None:
        """Evict a state that is not lent. Its slot becomes free at once, or when a copy of the state is made."""

    def flush(self, nodes: Iterable[Node[Lease]]) -> None:
        """Forget every copy. nodes: the nodes of the pool's tree whose states were forgotten by the same flush."""

    def finish_flush(self, ticket: int) -> None:
        """Send Flushed(ticket) as soon as nothing from before the flush is left below the pool."""

    # Up

    def copy_for(self, parked: Parked, match: Match[Lease]) -> LowerCopy | None:
        """Return a copy deeper than the match to resume from, or None; lend it to `parked`, and begin to load it."""

    def waits_for_peer(self, parked: Parked, match: Node[Lease], copy: LowerCopy | None) -> bool:
        """Return whether a peer will have a state deeper than match and copy, sooner than it could be computed here."""

    def release(self, parked: Parked) -> None:
        """End the loan that `copy_for` gave to a parked Acquire: the Acquire was answered or cancelled."""

    def is_ready(self, copy: LowerCopy) -> bool:
        """Return whether a slot can be filled from this copy now."""

    def key(self, copy: LowerCopy) -> int:
        """Return the key under which forward finds this copy."""

    def first_page(self, copy: LowerCopy) -> int:
        """Return the first page whose KV the copy has: a grant that uses it must have the pages before it already."""

    def lend(self, copy: LowerCopy) -> None:
        """Lend a copy to a grant whose slot is filled from it."""

    def end_loan(self, copy: LowerCopy) -> None:
        """End the loan to a grant: the grant's slot is filled, or never will be."""

    def loan_ended(self, node: Node[Lease]) -> None:
        """Note that a loan of this node's state in the pool has ended. The state may now be copied out of the pool."""

    # Sessions

    def begin_turn(self, session: str, origin: Origin) -> None:
        """Note that a grant of this session is open. Commands about the session wait until the grant is closed."""

    def end_turn(self, session: str, last: Node[Lease] | None) -> None:
        """Note that a grant of this session is closed. last: the node of the deepest state left on the grant's path."""

    def bind(self, session: str, node: Node[Lease]) -> None:
        """Put the session's name on this node's state, if the session is open."""

    def take_name(self, session: str, node: Node[Lease]) -> bool:
        """Remove the session's name from a state that moves to a grant of the session; return whether it was there."""


class NoTiers:
    """The Tiers of a cache without any: evicted states are lost, and a session resumes from what the tree still has."""

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

    def receive(self, message: Message) -> None:
        match message:
            case Name(session, ticket=ticket):
                self._send("api", Kept(session, "tokens", 0, ticket))
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

    def copy_for(self, parked: Parked, match: Match[Lease]) -> LowerCopy | None:
        return None

    def waits_for_peer(self, parked: Parked, match: Node[Lease], copy: LowerCopy | None) -> bool:
        return False

    def release(self, parked: Parked) -> None:
        pass

    def is_ready(self, copy: LowerCopy) -> bool:
        raise AssertionError("there are no copies")

    def key(self, copy: LowerCopy) -> int:
        raise AssertionError("there are no copies")

    def first_page(self, copy: LowerCopy) -> int:
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
