"""Slots and pages to be had: the free ones, and those that the tree can do without."""

from collections import Counter

from actors.cache.pages import PagePool
from actors.cache.radix import Node, RadixTree
from actors.cache.tiers import Tiers
from actors.lease import Lease, Ledger


class Allocator:
    """Hands out state slots and KV pages, and evicts the least recently used states and leaves for them.

    A part of the cache. A state with a session's name is copied first, where there is room for a copy; its slot and
    pages can be had only when Exported has come.
    grant_waits_for_slot: a grant waits for a slot, so none is given for checkpoints.
    """

    def __init__(
        self, ledger: Ledger, pages: PagePool, tree: RadixTree[Lease], tiers: Tiers, counters: Counter[str]
    ) -> None:
        self.grant_waits_for_slot = False
        self._ledger, self._pages, self._tree, self._tiers, self._counters = ledger, pages, tree, tiers, counters

    def slot_and_pages(
        self, node: Node[Lease] | None, session: str, pages: int, reserve: int
    ) -> tuple[Lease, bool, list[int]] | None:
        """A slot for a grant that goes on from node, whether it is node's own, and so many pages; or nothing at all.

        Nothing is evicted for a grant that cannot follow. reserve: pages to keep back, one for each open grant, which
        will soon want one.
        """
        if not self._has_pages(pages, reserve):
            return None
        lease, moved = self._state_slot(node, session)
        if lease is None:
            return None
        fresh = self.take_pages(pages)
        if fresh is None:
            self._give_back(lease, node if moved else None)
            return None
        return lease, moved, fresh

    def _state_slot(self, node: Node[Lease] | None, session: str) -> tuple[Lease | None, bool]:
        """A slot for a grant that goes on from node; the node's own state, moved, if no other can be had.

        It moves only if nobody else can go on from it; else a copy is made, from which this grant goes on too.
        """
        lease = self._ledger.take("cache") or self._evict_state(keep=node)
        own = node.state if node is not None else None
        if lease is None and node is not None and own is not None and not self._ledger.loans(own):
            if node.sessions <= {session}:
                self._ledger.uncache(own, "cache")
                return self._tree.take_state(node), True
            if not self._tiers.exports:
                self._evict(node)
        self.grant_waits_for_slot |= lease is None
        return lease, False

    def _give_back(self, lease: Lease, moved_from: Node[Lease] | None) -> None:
        """The pages wait for a copy that is being made; nobody else is to have the slot meanwhile."""
        self.grant_waits_for_slot = True
        if moved_from is None:
            self._ledger.free(lease)
        else:
            self._ledger.cache(lease, moved_from.id)
            self._tree.set_state(moved_from, lease)

    def spare_slot(self) -> Lease | None:
        """A slot that is free, or holds a state without a name."""
        return self._ledger.take("cache") or self._evict_state(unnamed_only=True)

    def _has_pages(self, wanted: int, reserve: int) -> bool:
        """Whether so many pages are free, or can be evicted."""
        pages = self._pages
        if not wanted or pages.free >= wanted + reserve:
            return True
        return pages.free + pages.cached >= wanted + reserve and self._can_evict(wanted - pages.free)

    def _can_evict(self, wanted: int) -> bool:
        """Whether eviction can free so many pages: goes through the tree as far as eviction would, leaves first."""
        pages, gone, unnamed = self._pages, set[Node[Lease]](), Counter[int]()
        for node in self._tree.nodes:
            if wanted <= 0:
                break
            if not node.pins and gone.issuperset(node.children.values()):
                gone.add(node)
                unnamed.update(node.pages)
                wanted -= sum(
                    unnamed[page] == pages.node_refs[page] and not pages.grant_refs[page] for page in node.pages
                )
        return wanted <= 0

    def take_pages(self, wanted: int) -> list[int] | None:
        """None if there are too few; those of a state that is being copied come back in a moment."""
        while self._pages.free < wanted:
            if self._tiers.exports or not self.evict_leaf():
                return None
        return self._pages.take(wanted)

    def evict_leaf(self) -> bool:
        """Drop the least recently used leaf that no open grant goes on from, and its state."""
        for node in self._tree.nodes:
            if not node.children and not node.pins:
                self.drop(node)
                return True
        return False

    def drop(self, leaf: Node[Lease]) -> None:
        if leaf.state is not None:
            self._evict(leaf)
        self._counters["evicted_pages"] += len(leaf.pages)
        self._tree.remove(leaf)

    def _evict_state(self, keep: Node[Lease] | None = None, unnamed_only: bool = False) -> Lease | None:
        """The slot of the least recently used state; while a copy is made, of one that needs none."""
        unnamed_only = unnamed_only or bool(self._tiers.exports)
        for node in self._tree.states:
            if node is not keep and not (unnamed_only and node.sessions) and self._is_evictable(node):
                self._evict(node)
                break
        return self._ledger.take("cache")

    def _is_evictable(self, node: Node[Lease]) -> bool:
        return node.state is not None and not self._ledger.loans(node.state)

    def _evict(self, node: Node[Lease]) -> None:
        self._counters["evicted_states"] += 1
        if node.sessions:
            self._tiers.demote(node)
        else:
            node.evicted = True
            self._ledger.free(self._tree.take_state(node))
