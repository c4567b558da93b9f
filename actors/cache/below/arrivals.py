"""Copies on their way up: what a parked Acquire is to resume from, and the loan that keeps it there."""

from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node
from baton.actors.cache.waiting import Parked


class Arrivals:
    """The copies that parked Acquires are to resume from: found, lent to the Acquire, and loaded from their files."""

    def __init__(self, store: CopyStore, ranking: Ranking) -> None:
        self._store, self._ranking = store, ranking
        self._parked: dict[int, Parked] = {}  # Acquires to which a copy is lent, by grant

    def copy_for(self, parked: Parked, position: int) -> Node[StateCopy] | None:
        """Return the copy to resume from, if one lies beyond `position`, lent to `parked`; begin to load it if need be.

        A session's own copy is always used, any other only if it is brought back sooner than computed.
        """
        acquire, store = parked.acquire, self._store
        node = store.match(acquire.salt, acquire.tokens, acquire.limit)
        awaited: Node[StateCopy] | None = parked.awaits
        is_lent = node is not None and node is awaited and copy_of(node).host is not Presence.ABSENT
        if node is not None and is_lent and node.end > position:
            return node  # A parked Acquire is tried again and again: that counts as one use of the copy.
        if node is None or node.end <= position or not self._pays(parked, node, position) or not store.load(node):
            self.release(parked)
            # Ending the loan may have forgotten the copy: then look for the next one.
            return self.copy_for(parked, position) if node is not None and node.state is None else None
        if awaited is not node:
            self.release(parked)
            store.lend(node)
            parked.awaits = node
            self._parked[acquire.grant] = parked
        parked.read |= copy_of(node).host is Presence.COMING and copy_of(node).in_file
        return node

    def _pays(self, parked: Parked, node: Node[StateCopy], position: int) -> bool:
        is_lent: bool = node is parked.awaits
        if is_lent or parked.acquire.session in node.sessions:
            return True
        return self._ranking.is_to_bring(node, position, in_host=copy_of(node).host is not Presence.ABSENT)

    def loaded(self, node: Node[StateCopy], error: str) -> None:
        """Note that a file was read. If it could not be, the Acquires that wait for it compute, and say why."""
        for parked in self._parked.values():
            if error and parked.awaits is node:
                parked.awaits, parked.miss_reason = None, "damaged"

    def release(self, parked: Parked) -> None:
        """End the loan to this Acquire, if it has one."""
        self._parked.pop(parked.acquire.grant, None)
        if parked.awaits is not None:
            node, parked.awaits = parked.awaits, None
            self._store.end_loan(node)
