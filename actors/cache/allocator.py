"""Slots and pages to be had: the free ones, and those that the tree can do without."""

from collections import Counter

from baton.actors.cache.account import Account
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree
from baton.actors.cache.tiers import Tiers
from baton.actors.cache.worth.lives import Lives, kind_after
from baton.actors.cache.worth.order import Order, above
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place


class Allocator:
    """Hands out state slots and KV pages, and evicts for them the states that are to go next, and bare leaves.

    A part of the cache. A state with a session's name, or one of which a copy pays, is copied first, if there is room;
    its slot and pages can be had only when Exported has come.
    grant_waits_for_slot: a grant waits for a slot, so none is given for checkpoints.
    """

    def __init__(
        self,
        ledger: Ledger,
        pages: PagePool,
        tree: RadixTree[Lease],
        order: Order[Lease],
        lives: Lives,
        tiers: Tiers,
        counters: Counter[str],
    ) -> None:
        self.grant_waits_for_slot = False
        self._ledger, self._pages, self._tree, self._order, self._lives = ledger, pages, tree, order, lives
        self._tiers, self._counters = tiers, counters

    def slot_and_pages(
        self, node: Node[Lease] | None, session: str, pages: int, reserve: int
    ) -> tuple[Lease, bool, list[int]] | None:
        """A slot for a grant that goes on from node, whether it is node's own, and so many pages; or nothing at all.

        Nothing is evicted for a grant that cannot follow. reserve: pages to keep back, one for each open grant, which
        will soon want one.
        """
        if not self._has_pages(pages, reserve):
            return None
        lease, moves = self._state_slot(node, session)
        if lease is None and not moves:
            return None
        fresh = self.take_pages(pages)
        if fresh is None:
            # The pages wait for a copy that is being made; nobody else is to have the slot meanwhile.
            self.grant_waits_for_slot = True
            if lease is not None:
                self._ledger.free(lease)
            return None
        return lease if lease is not None else self._move(node), moves, fresh

    def _state_slot(self, node: Node[Lease] | None, session: str) -> tuple[Lease | None, bool]:
        """A slot for a grant that goes on from node: a free one, that of the next to go, or whether its own goes along.

        Its own state moves where to keep it is worth less than the next to go, or no other slot can be had; and only
        if nobody else can go on from it: else a copy is made, from which this grant goes on too.
        """
        lease = self._ledger.take("cache")
        if lease is not None:
            return lease, False
        other = self._next_to_go(keep=node)
        can_move = node is not None and self._is_evictable(node) and node.sessions <= {session}
        if node is not None and can_move and (other is None or not self._is_kept_instead(node, other)):
            return None, True
        if other is not None:
            self._evict(other)
            lease = self._ledger.take("cache")
            if lease is None and can_move:
                return None, True
        elif node is not None and self._is_evictable(node) and not self._tiers.exports:
            self._evict(node)  # It is somebody else's: the grant is matched anew.
        self.grant_waits_for_slot |= lease is None
        return lease, False

    def _is_kept_instead(self, node: Node[Lease], other: Node[Lease]) -> bool:
        """Whether a state that somebody has gone on from is worth more than another that is to go."""
        return self._order.admits(kind_after(node), above(node), node.end, other)

    def _move(self, node: Node[Lease] | None) -> Lease:
        assert node is not None and node.state is not None
        self._ledger.uncache(node.state, "cache")
        self._lives.moved(node)
        return self._tree.take_state(node)

    def put_back(self, node: Node[Lease], lease: Lease) -> None:
        """A state that was moved has not been used."""
        self._ledger.cache(lease, node.id)
        self._tree.set_state(node, lease)
        self._lives.kept(node, node.kind)

    def checkpoint_slot(self, account: Account, position: int, kind: Kind) -> Lease | None:
        """A slot for a checkpoint: a free one, or that of a state which is worth less and need not be copied.

        The last free ones are kept at hand for requests, unless the next to go, for which another is freed, is worth
        less. None while a request waits for a slot to run in. Where others wait for the checkpoint any state goes.
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
        """Whether a free slot may go to this checkpoint, if there is one."""
        if self._ledger.counts[Place.FREE] > self._tiers.at_hand:
            return True
        other = self._next_to_go()
        return other is None or not self._tiers.is_to_copy(other) or self._admits(account, position, kind, other)

    def _evict_for(self, account: Account, position: int, kind: Kind) -> Lease | None:
        other = self._next_to_go(at_once=True)
        if other is None or not self._admits(account, position, kind, other):
            return None
        self._evict(other)
        return self._ledger.take("cache")

    def _admits(self, account: Account, position: int, kind: Kind, other: Node[Lease]) -> bool:
        above = max((p for p in (account.position, *account.checkpoints) if p < position), default=0)
        return position in account.marks or self._order.admits(kind, above, position, other)

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
            if not self.evict_leaf(for_page=bool(self._tiers.exports)):
                return None
        return self._pages.take(wanted)

    def evict_leaf(self, for_page: bool = False) -> bool:
        """Drop a leaf that no open grant goes on from: one without a state, or else that of the next to go.

        for_page: only one that gives a page at once.
        """

        def may_go(node: Node[Lease]) -> bool:
            return not node.children and not node.pins and not (for_page and not self._gives_page(node))

        leaf = next(filter(may_go, self._tree.bare), None) or self._order.least(may_go)
        if leaf is not None:
            self.drop(leaf)
        return leaf is not None

    def _gives_page(self, leaf: Node[Lease]) -> bool:
        """Whether a page is free as soon as this leaf is dropped."""
        pages = self._pages
        own = any(pages.node_refs[page] == 1 and not pages.grant_refs[page] for page in leaf.pages)
        return own and not (leaf.state is not None and self._tiers.is_to_copy(leaf))

    def drop(self, leaf: Node[Lease]) -> None:
        if leaf.state is not None:
            self._evict(leaf)
        self._counters["evicted_pages"] += len(leaf.pages)
        self._lives.forgotten(leaf)
        self._tree.remove(leaf)

    def _next_to_go(self, keep: Node[Lease] | None = None, at_once: bool = False) -> Node[Lease] | None:
        """The state that is to give up its slot; while a copy is made, of those that need none."""
        at_once = at_once or bool(self._tiers.exports)
        return self._order.least(
            lambda node: (
                node is not keep and self._is_evictable(node) and not (at_once and self._tiers.is_to_copy(node))
            )
        )

    def _is_evictable(self, node: Node[Lease]) -> bool:
        return node.state is not None and not self._ledger.loans(node.state)

    def _evict(self, node: Node[Lease]) -> None:
        self._counters["evicted_states"] += 1
        self._tiers.evict(node)
