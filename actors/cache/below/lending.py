"""Copies in host memory that are lent to peers."""

from collections import Counter
from collections.abc import Iterator

from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.radix import Node
from baton.actors.messages import Lend
from baton.actors.storage.peers import Peers


class Lending:
    """The loans to peers, each of a copy in host memory, and the Lends that are not answered yet.

    A loan ends exactly once, with Unlend. Until then the copy stays where it is, also after a flush.
    """

    def __init__(self, peers: Peers, store: CopyStore) -> None:
        self.counters: Counter[str] = Counter()
        self._peers, self._store = peers, store
        self._asked: dict[int, Lend] = {}  # Lends that are not answered yet, by ticket
        self._lent: dict[int, Node[StateCopy]] = {}  # by ticket

    def ask(self, lend: Lend) -> None:
        """Note a new Lend."""
        self._asked[lend.ticket] = lend

    def lend(self, lend: Lend, node: Node[StateCopy]) -> None:
        """Lend a copy that is in host memory."""
        assert node.state is not None
        del self._asked[lend.ticket]
        self._store.lend(node)
        self._lent[lend.ticket] = node
        self.counters["peer_loans"] += 1
        self._peers.lent(lend.ticket, node.state.key, node.end)

    def nodes(self) -> Iterator[Node[StateCopy]]:
        """Yield the node of each lent copy, once for each loan."""
        yield from self._lent.values()

    def refuse(self, lend: Lend, why: str) -> None:
        """Answer a Lend for which there is no copy."""
        del self._asked[lend.ticket]
        self._peers.not_lent(lend.ticket, why)

    def end(self, ticket: int) -> Lend | None:
        """End the loan of this ticket; if its Lend is not answered yet, return the Lend, which is to be withdrawn."""
        if (node := self._lent.pop(ticket, None)) is not None:
            self._store.end_loan(node)
        return self._asked.pop(ticket, None)
