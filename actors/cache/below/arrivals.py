"""Copies that parked Acquires are to resume from, and the loans that keep these copies until then."""

from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node
from baton.actors.cache.waiting import Parked
from baton.actors.requests import MissReason


class Arrivals:
    """The copies from which parked Acquires will resume. Each is lent to its Acquire, and read from disk if needed."""

    def __init__(self, store: CopyStore, ranking: Ranking) -> None:
        self._store, self._ranking = store, ranking
        self._parked: dict[int, Parked] = {}  # Acquires to which a copy is lent, by grant

    def copy_for(self, parked: Parked, position: int, pages: int) -> Node[StateCopy] | None:
        """Return a copy deeper than `position` to resume from, or None; lend it to `parked`, and begin to load it.

        pages: how many leading pages of KV the grant would have without the copy

        The copy of the request's own session is always used. Another copy is used only if restoring it is faster than
        computing its tokens.
        """
        acquire, store = parked.acquire, self._store
        node = store.match(acquire.salt, acquire.tokens, acquire.limit, pages)
        awaited: Node[StateCopy] | None = parked.awaits
        is_lent = node is not None and node is awaited and copy_of(node).host is not Presence.ABSENT
        if node is not None and is_lent and node.end > position:
            return node  # A parked Acquire is retried on every event. Count all its tries as one use of the copy.
        if node is None or node.end <= position or not self._pays(parked, node, position) or not store.load(node):
            self.release(parked)
            # If the copy was forgotten when its loan ended, look for the next copy.
            return self.copy_for(parked, position, pages) if node is not None and node.state is None else None
        if awaited is not node:
            self.wait_for(node, parked)
        if copy_of(node).host is Presence.COMING and copy_of(node).in_file:
            parked.origin = "disk"
        return node

    def wait_for(self, node: Node[StateCopy], parked: Parked) -> None:
        """Lend a copy to a parked Acquire, which is to resume from it."""
        self.release(parked)
        self._store.lend(node)
        parked.awaits, parked.origin = node, "host"
        self._parked[parked.acquire.grant] = parked

    def _pays(self, parked: Parked, node: Node[StateCopy], position: int) -> bool:
        is_lent: bool = node is parked.awaits
        if is_lent or parked.acquire.session in node.sessions:
            return True
        return self._ranking.is_to_bring(node, position, in_host=copy_of(node).host is not Presence.ABSENT)

    def loaded(self, node: Node[StateCopy], error: str, reason: MissReason = "damaged") -> None:
        """Note that a copy was read. If that failed, the Acquires that wait for it compute, and report the reason."""
        for parked in self._parked.values():
            if error and parked.awaits is node:
                parked.awaits, parked.miss_reason = None, reason

    def release(self, parked: Parked) -> None:
        """End the loan of a copy to this Acquire, if there is one."""
        self._parked.pop(parked.acquire.grant, None)
        if parked.awaits is not None:
            node, parked.awaits = parked.awaits, None
            self._store.end_loan(node)
