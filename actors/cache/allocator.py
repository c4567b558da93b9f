"""Slots and pages for grants: free ones, and those that eviction frees."""

from collections import Counter

from baton.actors.cache.account import Account
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree
from baton.actors.cache.tiers import Tiers
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place


class Allocator:
    """The source of state slots and KV pages. If too few are free, it evicts states and drops leaves without a state.

    The eviction policy picks the states. The tiers may have to copy a state first. Its slot and pages are then free
    only when `Exported` arrives: the caller gets nothing now, and has to try again.
    """

    def __init__(
        self,
        ledger: Ledger,
        pages: PagePool,
        tree: RadixTree[Lease],
        eviction: EvictionPolicy,
        tiers: Tiers,
        counters: Counter[str],
    ) -> None:
        self.grant_waits_for_slot = False  # while true, no checkpoint gets a slot
        self._ledger, self._pages, self._tree, self._eviction = ledger, pages, tree, eviction
        self._tiers, self._counters = tiers, counters

    # The page table of a grant that resumes from a state at position 10, where a page holds 4 positions:
    #
    #     position         0       4       8   10  12      16      20
    #     tokens + 1       ├───────────────────────────────────────┤
    #     tree's path      ├───────────────────┤ state
    #       its pages      [   A  ][   B  ][ C  . ]
    #     grant's pages    [   A  ][   B  ][   X  ][   Y  ][   Z  ]
    #                      └─── shared ───┘└─ fresh, `pages` = 3 ─┘
    #
    # Whole pages of the path are shared: the grant adds a reference and never writes to them. C is not full, and the
    # grant would append to C, so forward first copies C into the fresh page X (`Granted.page_copy`); until then the
    # grant holds a reference to C too. X, Y and Z are the grant's alone until it donates a state. Then tree nodes name
    # these pages too, and after the account has closed only the nodes hold them. The state itself is lent, and copied
    # into a fresh slot; or its own slot moves to the grant.

    def slot_and_pages(
        self, node: Node[Lease] | None, session: str, pages: int, reserve: int
    ) -> tuple[Lease, bool, list[int]] | None:
        """Return a slot, whether it is the slot of `node`'s own state, and fresh pages; None if either is missing.

        Pages are checked first, so that no state is evicted for a grant that cannot get its pages.

        node: the node whose state the grant resumes from; None if it resumes from a copy below the pool
        session: the session of the grant; a state with this session's name alone may move to the grant
        pages: how many fresh pages the grant needs
        reserve: how many more pages must be left: one for each open grant, because its row will soon need one
        """
        if not self._has_pages(pages, reserve):
            return None
        lease, moves = self._state_slot(node, session)
        if lease is None and not moves:
            return None
        fresh = self.take_pages(pages)
        if fresh is None:
            # The missing pages become free when a copy in progress is complete. Until then no checkpoint gets the slot.
            self.grant_waits_for_slot = True
            if lease is not None:
                self._ledger.free(lease)
            return None
        return lease if lease is not None else self._move(node), moves, fresh

    def _state_slot(self, node: Node[Lease] | None, session: str) -> tuple[Lease | None, bool]:
        """Return a slot for a grant that resumes from `node`; or None, and whether the state's own slot moves to it.

        The choices in order: a free slot; the slot of `node`'s state, if that state is worth less than the next one to
        be evicted; the slot of the next one to be evicted; the slot of `node`'s state, if no other can be had. A state
        moves only if it is not lent and no other session has its name on it.
        """
        lease = self._ledger.take("cache")
        if lease is not None:
            return lease, False
        other = self._next_to_evict(keep=node)
        can_move = node is not None and self._is_evictable(node) and node.sessions <= {session}
        if node is not None and can_move and (other is None or not self._eviction.outranks(node, other)):
            return None, True
        if other is not None:
            self._evict(other)
            lease = self._ledger.take("cache")  # None if the evicted state must be copied before its slot is free
            if lease is None and can_move:
                return None, True
        elif node is not None and self._is_evictable(node) and not self._tiers.exporting:
            # Only the state to resume from can be evicted, and it cannot move: another session's name is on it. Evict
            # it. The Acquire is then matched again, and resumes from the state's copy or from a state further up.
            self._evict(node)
        self.grant_waits_for_slot |= lease is None
        return lease, False

    def _move(self, node: Node[Lease] | None) -> Lease:
        assert node is not None and node.state is not None
        self._ledger.uncache(node.state, "cache")
        self._eviction.moved(node)
        return self._tree.take_state(node)

    def put_back(self, node: Node[Lease], lease: Lease) -> None:
        """Return a moved state to its node: its grant was given back unused."""
        self._ledger.cache(lease, node.id)
        self._tree.set_state(node, lease)
        self._eviction.stored(node, node.kind)

    def checkpoint_slot(self, account: Account, position: int, kind: Kind) -> Lease | None:
        """Return a slot for a checkpoint: a free slot, or that of a state which is worth less and needs no copy first.

        Return None while a grant waits for a slot, or if the checkpoint is not worth one. A checkpoint that other
        Acquires wait for is worth more than any state.
        """
        lease = None
        if not self.grant_waits_for_slot:
            if self._is_free_for(account, position, kind):
                lease = self._ledger.take("cache")
            lease = lease or self._evict_for(account, position, kind)
        if lease is None:
            account.pass_by(position)
        else:
            account.checkpoints[position] = kind
        return lease

    def _is_free_for(self, account: Account, position: int, kind: Kind) -> bool:
        """Return whether a checkpoint may take a free slot, if there is one.

        The last free slots are the tiers' reserve for grants. If a checkpoint takes one of them, the tiers copy and
        evict another state to refill the reserve. So the checkpoint must be worth more than that state. If the state
        needs no copy, the reserve is not refilled ahead of need, and the checkpoint may take the slot.
        """
        if self._ledger.counts[Place.FREE] > self._tiers.slot_reserve:
            return True
        other = self._next_to_evict()
        return other is None or not self._tiers.is_to_copy(other) or self._admits(account, position, kind, other)

    def _evict_for(self, account: Account, position: int, kind: Kind) -> Lease | None:
        other = self._next_to_evict(at_once=True)
        if other is None or not self._admits(account, position, kind, other):
            return None
        self._evict(other)
        return self._ledger.take("cache")

    def _admits(self, account: Account, position: int, kind: Kind, other: Node[Lease]) -> bool:
        above = max((p for p in (account.position, *account.checkpoints) if p < position), default=0)
        return position in account.marks or self._eviction.admits(kind, above, position, other)

    def _has_pages(self, count: int, reserve: int) -> bool:
        """Return whether `count` pages are free or can be freed by eviction, with `reserve` more pages to spare."""
        pages = self._pages
        if not count or pages.free >= count + reserve:
            return True
        return pages.free + pages.cached >= count + reserve and self._can_evict(count - pages.free)

    def _can_evict(self, missing: int) -> bool:
        """Return whether eviction can free `missing` pages.

        Go through the tree as eviction would, descendants before ancestors, until enough pages are found. A node can be
        dropped if it has no pins and all its children can be dropped. A page becomes free with the last node that names
        it, unless a grant holds it.
        """
        pages, dropped, unnamed = self._pages, set[Node[Lease]](), Counter[int]()
        for node in self._tree.nodes:
            if missing <= 0:
                break
            if not node.pins and dropped.issuperset(node.children.values()):
                dropped.add(node)
                unnamed.update(node.pages)
                missing -= sum(
                    unnamed[page] == pages.node_refs[page] and not pages.grant_refs[page] for page in node.pages
                )
        return missing <= 0

    def take_pages(self, count: int) -> list[int] | None:
        """Return `count` pages, dropping leaves as needed; None if eviction cannot free enough pages now.

        While a state is being copied out of the pool, its pages will soon be free. Until then only leaves are dropped
        that free a page at once.
        """
        while self._pages.free < count:
            if not self.evict_leaf(for_page=self._tiers.exporting):
                return None
        return self._pages.take(count)

    def evict_leaf(self, for_page: bool = False) -> bool:
        """Drop a leaf that no grant has pinned; return whether there was one.

        Leaves without a state are dropped first, then the leaf whose state is the next to be evicted.

        for_page: drop only a leaf that frees a page at once
        """

        def may_go(node: Node[Lease]) -> bool:
            return not node.children and not node.pins and not (for_page and not self._frees_page(node))

        leaf = next(filter(may_go, self._tree.bare), None) or self._eviction.next_to_evict(may_go)
        if leaf is not None:
            self.drop(leaf)
        return leaf is not None

    def _frees_page(self, leaf: Node[Lease]) -> bool:
        """Return whether dropping this leaf frees a page at once."""
        pages = self._pages
        is_last = any(pages.node_refs[page] == 1 and not pages.grant_refs[page] for page in leaf.pages)
        return is_last and not (leaf.state is not None and self._tiers.is_to_copy(leaf))

    def drop(self, leaf: Node[Lease]) -> None:
        """Remove a leaf from the tree, evicting its state first if it has one."""
        if leaf.state is not None:
            self._evict(leaf)
        self._counters["evicted_pages"] += len(leaf.pages)
        self._eviction.forgotten(leaf)
        self._tree.remove(leaf)

    def _next_to_evict(self, keep: Node[Lease] | None = None, at_once: bool = False) -> Node[Lease] | None:
        """Return the node whose state is to be evicted next; None if no state can be evicted.

        While a state is being copied out of the pool, no eviction begins a second copy. Until then only states that
        need no copy are considered.

        keep: a node that must not be chosen
        at_once: consider only states that need no copy, so that their slots are free at once
        """
        at_once = at_once or self._tiers.exporting
        return self._eviction.next_to_evict(
            lambda node: (
                node is not keep and self._is_evictable(node) and not (at_once and self._tiers.is_to_copy(node))
            )
        )

    def _is_evictable(self, node: Node[Lease]) -> bool:
        return node.state is not None and not self._ledger.loans(node.state)

    def _evict(self, node: Node[Lease]) -> None:
        self._counters["evicted_states"] += 1
        self._tiers.evict(node)
