"""Copies in host memory that are lent to peers."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from baton.actors.cache.below.commands import Awaited
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node, RadixTree
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import Lend
from baton.actors.storage.peers import Peers
from baton.actors.tokens import count


class Lending:
    """The loans to peers, each of a copy in host memory, and the Lends that are not answered yet.

    A loan ends exactly once, with Unlend. Until then the copy stays where it is, also after a flush.
    """

    def __init__(
        self,
        peers: Peers,
        store: CopyStore,
        tree: RadixTree[Lease],
        ledger: Ledger,
        demote: Callable[[Node[Lease]], bool],
    ) -> None:
        """demote: moves a state of the pool to host memory; returns False if its copy does not fit."""
        self.counters: Counter[str] = Counter()
        self._peers, self._store, self._tree, self._ledger, self._demote = peers, store, tree, ledger, demote
        self._asked: dict[int, Lend] = {}  # Lends that are not answered yet, by ticket
        self._lent: dict[int, Node[StateCopy]] = {}  # by ticket

    def ask(self, lend: Lend) -> None:
        """Note a new Lend."""
        self._asked[lend.ticket] = lend

    def carry_out(self, lend: Lend, may_wait: bool, draining: bool) -> Hashable | None:
        """Lend a copy of the deepest state on the path of the command's tokens; move the state to host memory first.

        Return the key to wait under if the next move is not possible yet (see Commands); `carry_out` is called again
        afterwards.

        may_wait: whether a transfer is under way, whose end may bring room in host memory
        draining: refuse: a state that is lent now would stay after the drain
        """
        if draining:
            return self._refuse(lend, "draining")
        end = count(lend.tokens)
        pool = self._tree.deepest(lend.salt, lend.tokens, end)
        stored = self._store.match(lend.salt, lend.tokens, end)
        has_room = True
        if pool is not None and pool.end >= lend.least and (stored is None or stored.end < pool.end):
            assert pool.state is not None
            if self._ledger.loans(pool.state):
                return pool
            has_room = self._demote(pool)
            stored = self._store.match(lend.salt, lend.tokens, end)
        elif stored is not None and stored.end >= lend.least and copy_of(stored).host is Presence.ABSENT:
            has_room = self._store.load(stored)
        if not has_room:
            return Awaited.ROOM if may_wait else self._refuse(lend, "no room in host memory")
        if stored is None or stored.end < lend.least:
            return self._refuse(lend, "no such state")
        if copy_of(stored).host is Presence.COMING:
            return stored
        return self._lend(lend, stored)

    def _lend(self, lend: Lend, node: Node[StateCopy]) -> Hashable | None:
        """Lend a copy that is in host memory; return None, as `_refuse` does."""
        del self._asked[lend.ticket]
        self._store.lend(node)
        self._lent[lend.ticket] = node
        self.counters["peer_loans"] += 1
        self._peers.lent(lend.ticket, copy_of(node).key, node.end)
        return None

    def nodes(self) -> Iterator[Node[StateCopy]]:
        """Yield the node of each lent copy, once for each loan."""
        yield from self._lent.values()

    def _refuse(self, lend: Lend, why: str) -> Hashable | None:
        """Answer a Lend for which there is no copy; return None, because the command has nothing left to wait for."""
        del self._asked[lend.ticket]
        self._peers.not_lent(lend.ticket, why)
        return None

    def end(self, ticket: int) -> Lend | None:
        """End the loan of this ticket; if its Lend is not answered yet, return the Lend, which is to be withdrawn."""
        if (node := self._lent.pop(ticket, None)) is not None:
            self._store.end_loan(node)
        return self._asked.pop(ticket, None)
