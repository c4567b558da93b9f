"""The cache actor: it owns free slots, the radix tree and page counts, and decides what is granted and evicted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.hints import claim_hinted, denied_positions, end_kind
from baton.actors.cache.page_queue import PageQueue
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import LowerCopy, Match, Node, RadixTree, path_to_root
from baton.actors.cache.tiers import Tiers
from baton.actors.cache.together import Together
from baton.actors.cache.waiting import Parked, Wait, Waiting
from baton.actors.grants import Fill, PageCopy
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import (
    Acquire,
    Cancel,
    Closed,
    Copied,
    Donate,
    Drain,
    Drained,
    Extend,
    Flush,
    Free,
    Granted,
    Message,
    Passed,
    Refused,
    Return,
    SaveFromReq,
    Spare,
    Want,
)
from baton.actors.requests import Hit
from baton.actors.tokens import count, cut

MAX_TREE_TOKENS = 1 << 22
WORTH_WAITING = 64
# How many later Acquires may be granted before one that waits for a slot or pages. After that, all later ones wait too.
MAX_OVERTAKING = 8
# After this many Acquires have found no slot or pages in one `act`, no further Acquire is tried in that `act`.
MAX_BLOCKED = 4


@dataclass
class Cache:
    """The cache actor. It owns the free slots, the radix tree with its pages, and the accounts of open grants.

    The eviction policy and the tiers below the pool are arguments: see `EvictionPolicy` and `Tiers`. The function
    `make_cache` makes a cache with the policy and the tiers of the server.
    """

    send: Send
    ledger: Ledger
    tree: RadixTree[Lease]
    eviction: EvictionPolicy
    tiers: Tiers
    max_tree_tokens: int = MAX_TREE_TOKENS  # leaves of a tree with more tokens are dropped, even if pages are free
    worth_waiting: int = WORTH_WAITING  # an Acquire waits for another grant's state only if it saves more tokens
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.accounts: dict[int, Account] = {}  # by grant
        self.allocator = self._make_allocator()
        self.page_queue = PageQueue(self.send, self.accounts, self.pages, self.tree, self.tiers, self.allocator)
        self.waiting = Waiting()
        self.together = Together(self.send, self.accounts, self.tree, self.worth_waiting)
        self._flushed: dict[Node[Lease], Lease] = {}  # states that were lent when the tree was flushed
        self._closed: list[int] = []  # grants that were closed since the last `act`
        self._draining = False

    @property
    def pages(self) -> PagePool:
        return self.tree.pages

    def _make_allocator(self) -> Allocator:
        return Allocator(self.ledger, self.pages, self.tree, self.eviction, self.tiers, self.counters)

    def receive(self, message: Message) -> None:
        match message:
            case Acquire():
                self.waiting.park(message)
            case Cancel(grant):
                if (parked := self._forget(grant)) is not None:
                    self.send("scheduler", Refused(grant, "cancelled", "the request was aborted", parked.overtaken))
            case Want():
                self._give_spares(message)
            case Passed(grant, position):
                if grant in self.accounts:
                    self.accounts[grant].pass_by(position)
            case Extend(grants):
                self.page_queue.add(grants)
            case Copied(grant):
                self._end_loans(self.accounts[grant])
            case Return(grant, state):
                self._undo(self.accounts[grant], state)
            case Donate():
                self._donate(message, ends=message.closes)
            case SaveFromReq():
                self._save(message)
            case Free(leases, closes):
                for lease in leases:
                    self.ledger.free(lease)
                if closes is not None:
                    self._close(self.accounts[closes])
            case Flush(ticket):
                self._flush()
                self.tiers.finish_flush(ticket)
            case Drain():
                self._draining = True
                self.tiers.drain()
            case _:
                self.tiers.receive(message)

    def act(self) -> None:
        self.tiers.act()
        self.page_queue.give()
        self._serve()
        self.tiers.keep_slots_free()
        for grant in self._closed:
            self.send("scheduler", Closed(grant))
        self._closed.clear()
        self._bound_tree()
        if self._draining and not self.accounts and not self.ledger.counts[Place.TRANSIT] and self.tiers.idle:
            self._draining = False
            self.send("api", Drained(self._leaks()))

    def leases(self) -> Iterator[Lease]:
        yield from (node.state for node in self.tree.states if node.state is not None)
        yield from self._flushed.values()

    # Granting

    def _serve(self) -> None:
        """Answer parked Acquires, the most urgent first, but none while a running row waits for a page.

        An Acquire that waits for a slot or pages is overtaken by at most MAX_OVERTAKING later ones that need less. An
        Acquire that waits for a copy, for its predecessor (its request's previous grant) or for its leader (see
        `Together`) is skipped, and delays no other.
        """
        self.allocator.grant_waits_for_slot = False
        blocked: list[Parked] = []
        for parked in self.waiting.in_order():
            if self.page_queue or len(blocked) == MAX_BLOCKED:
                return
            if any(earlier.overtaken >= MAX_OVERTAKING for earlier in blocked):
                return
            if parked.acquire.predecessor in self.accounts or self.together.is_waiting(parked):
                continue
            waits_for = self._answer(parked)
            if waits_for is Wait.ALLOCATION:
                blocked.append(parked)
            elif waits_for is None:
                self._forget(parked.acquire.grant)
                for earlier in blocked:
                    earlier.overtaken += 1

    def _forget(self, grant: int) -> Parked | None:
        parked = self.waiting.forget(grant)
        if parked is not None:
            self.tiers.release(parked)
        return parked

    def _answer(self, parked: Parked) -> Wait | None:
        """Grant or refuse an Acquire and return None, or return what the Acquire has to wait for."""
        acquire = parked.acquire
        need = self.pages.cover(count(acquire.tokens) + 1)
        if need > len(self.pages.grant_refs):
            room = len(self.pages) * self.pages.size - 1
            text = f"{count(acquire.tokens)} tokens do not fit: the KV pages hold {room} tokens and one to generate"
            self.send("scheduler", Refused(acquire.grant, "too_large", text))
            return None
        match = self.tree.match(acquire.salt, acquire.tokens, acquire.limit)
        below = self.tiers.copy_for(parked, match)
        if below is not None and not self.tiers.is_ready(below):
            return Wait.COPY
        if self.together.waits(parked, below.end if below is not None else match.node.end):
            return Wait.TOGETHER
        if self.tiers.waits_for_peer(parked, match.node, below):
            return Wait.PEER
        had_state = match.node.state is not None
        if self._grant(parked, match, below, need):
            return None
        if had_state and match.node.state is None and not self.tiers.exporting:
            return self._answer(parked)  # The matched state itself was evicted, so a slot is free now: match again.
        if self.accounts or self.tiers.exporting:
            return Wait.ALLOCATION
        # No other grant can free a slot or pages, so only the matched path is in the way: its nodes are pinned while
        # the grant is attempted. Retry with a match at the root, so that they can be evicted; then without the copy.
        top = self.tree.match(acquire.salt, b"", 0).node
        root = Match(top, match.tokens, top, "evicted")
        granted = top is not match.node and (
            (below is not None and self._grant(parked, root, below, need)) or self._grant(parked, root, None, need)
        )
        return None if granted else Wait.ALLOCATION

    def _grant(self, parked: Parked, match: Match[Lease], below: LowerCopy | None, need: int) -> bool:
        """Grant a slot and `need` pages, including the match's whole pages; return False if slot or pages are missing.

        below: the copy to fill the slot from; it shares known pages after the match too. None: use the matched state
        """
        acquire, node = parked.acquire, match.node
        table = self.tree.page_table(node) if below is None else self.tree.whole_pages(match, below.end)
        whole = len(table) if below is not None else node.end // self.pages.size if table else 0
        if below is not None and self.tiers.first_page(below) > whole:
            return False  # the copy has no KV of some pages that the path has lost
        # If the match ends inside a page, the grant needs its own copy of the page. A copy from below the pool has one.
        copy_source = table[whole] if whole < len(table) and below is None else None
        shared = table[:whole] if copy_source is None else table[: whole + 1]
        # Hold the path and its pages first, so that making room cannot evict them.
        node.pins += 1
        self.pages.add_grant_refs(shared)
        lent = node if below is None else None
        found = self.allocator.slot_and_pages(lent, acquire.session, need - whole, reserve=len(self.accounts))
        if found is None:
            self.pages.drop_grant_refs(shared)
            self.tree.unpin(node)
            return False
        state, moved, fresh = found
        account = Account(acquire, node, self.tree.epoch, table[:whole] + fresh, whole)
        account.copy_source = copy_source
        account.named = moved and self.tiers.take_name(acquire.session, node)
        if below is not None:
            # The tree does not know the tokens between the match and the copy yet: the next Donate inserts them.
            account.fill, account.tail = below, cut(acquire.tokens, node.end, below.end)
            self.tiers.lend(below)
        elif node.state is not None:
            account.loan_node, account.loan = node, self.ledger.lend(node.state)
            self.eviction.resumed(node)
        if match.lost is not None:
            self.eviction.missed(match.lost, copied=below is not None and below.end >= match.lost.end)
        self._open(account)
        self._granted(parked, account, match, state, moved)
        return True

    def _open(self, account: Account) -> None:
        """Open a grant's account, and mark its path as used; count a use of the state only if the state is lent."""
        self.accounts[account.grant] = account
        self.tree.touch(account.node, with_state=account.loan is not None)
        claim_hinted(account, self.eviction)

    def _granted(self, parked: Parked, account: Account, match: Match[Lease], state: Lease, moved: bool) -> None:
        """Update the counters for a grant, and send Granted."""
        acquire, position = parked.acquire, account.position
        length, known = count(acquire.tokens), max(match.tokens, position)
        self.counters["prefix_cache_queries"] += length
        self.counters["prefix_cache_hits"] += position
        origin = account.origin(moved, parked.origin)
        missed = parked.miss_reason or match.miss_reason if account.fill is None else ""
        self.counters[f"granted_from:{origin}"] += 1
        if acquire.session:
            self.tiers.begin_turn(acquire.session, origin)
        self.send(
            "scheduler",
            Granted(
                acquire.grant,
                state,
                Hit(position, known, missed, origin),
                moved,
                account.loan,
                list(account.pages),
                None if account.copy_source is None else PageCopy(account.copy_source, account.pages[account.shared]),
                known if match.parts and position < known <= acquire.limit else None,
                None
                if account.fill is None
                else Fill(self.tiers.key(account.fill), account.shared, self.pages.cover(account.fill.end)),
            ),
        )

    def _give_spares(self, want: Want) -> None:
        """Answer a Want with Spare, which carries a slot for each checkpoint that is worth one."""
        account = self.accounts.get(want.grant)
        leases: list[Lease] = []
        denied: list[int] = []
        for position, kind in want.checkpoints:
            lease = self.allocator.checkpoint_slot(account, position, kind) if account is not None else None
            if lease is not None:
                leases.append(lease)
            else:
                denied.append(position)
        self.counters["checkpoints_granted"] += len(leases)
        self.send("scheduler", Spare(want.grant, leases, denied))

    # Giving back

    def _donate(self, donate: Donate, ends: bool) -> None:
        """Cache a donated state, unless its path was flushed or its position contradicts its tokens (a bug elsewhere).

        ends: whether the state is at the end of the request; otherwise it is a checkpoint
        """
        account = self.accounts[donate.grant]
        account.marks.discard(donate.position)
        if account.epoch != self.tree.epoch:
            self.ledger.free(donate.state)
        elif account.position + count(donate.tokens) != donate.position:
            self.ledger.quarantine(
                donate.state.slot,
                f"donated at {donate.position} with {count(donate.tokens)} tokens since {account.position}",
            )
            donate.state.surrender("quarantined")
        else:
            self._keep(account, donate, ends)
        if donate.closes:
            self._close(account)

    def _keep(self, account: Account, donate: Donate, ends: bool) -> None:
        """Insert the tokens of a donated state into the tree, and cache the state if its node has none yet."""
        node = self.tree.insert(account.node, account.tail + donate.tokens, account.pages)
        account.tail = b""
        node.pins += 1  # Pin first: if the old node is the same root, `unpin` would forget it.
        self.tree.unpin(account.node)
        account.node = node
        kind = (
            end_kind(account, self.eviction.end_kind(node, count(account.acquire.tokens)))
            if ends
            else account.checkpoints.pop(node.end, Kind.CHECKPOINT)
        )
        is_new = node.state is None and node.parent is not None  # A root, at position 0, keeps no state.
        if is_new and self.eviction.keeps(node, kind):
            self.ledger.cache(donate.state, node.id)
            self.tree.set_state(node, donate.state)
            self.eviction.stored(node, kind)
        else:
            self.ledger.free(donate.state)
            if node.state is not None:
                self.eviction.duplicated(node, kind)
        self.tree.touch(node)
        claim_hinted(account, self.eviction)
        self.tree.deny(node, denied_positions(account))

    def _save(self, save: SaveFromReq) -> None:
        """Cache the state at the end of a session's turn, and move the session's name to it."""
        account = self.accounts[save.grant]
        self._donate(Donate(save.grant, save.state, save.position, save.tokens, closes=False), ends=True)
        self._name(account)
        self._close(account)

    def _name(self, account: Account) -> None:
        """Move the session's name to the deepest cached state on the turn's path."""
        node = self._last_state(account)
        if node is not None:
            self.tiers.bind(account.session, node)

    def _last_state(self, account: Account) -> Node[Lease] | None:
        """Return the deepest state on the account's path; None if there is none, or if the path was flushed."""
        if account.epoch != self.tree.epoch:
            return None
        return next((step for step in path_to_root(account.node) if step.state is not None), None)

    def _undo(self, account: Account, state: Lease) -> None:
        """Take back a grant that was not admitted. A moved state returns to its node, with its session's name."""
        moved_from = account.node if account.loan is None and account.position and not account.tail else None
        if moved_from is not None and account.epoch == self.tree.epoch and moved_from.state is None:
            self.allocator.put_back(moved_from, state)
            if account.named:
                self.tiers.bind(account.session, moved_from)
        else:
            self.ledger.free(state)
        self._end_loans(account)
        self._close(account)

    def _end_loans(self, account: Account) -> None:
        """End the loans of a grant: forward has made its copies, or the grant was returned unused."""
        if account.loan is not None and account.loan_node is not None:
            self.ledger.end_loan(account.loan)
            lent = self._flushed.get(account.loan_node)
            if lent is not None and not self.ledger.loans(lent):
                self.ledger.free(self._flushed.pop(account.loan_node))
            self.tiers.loan_ended(account.loan_node)
            account.loan = account.loan_node = None
        if account.copy_source is not None:
            self.pages.drop_grant_refs([account.copy_source])
            account.copy_source = None
        if account.fill is not None:
            self.tiers.end_loan(account.fill)
            account.fill = None
        self.page_queue.loans_ended(account.grant)
        if account.closing:
            self._close(account)

    def _close(self, account: Account) -> None:
        """Close an account, or mark it to be closed when its loans have ended."""
        account.closing = True
        if account.on_loan:
            return
        del self.accounts[account.grant]
        self.page_queue.leave(account.grant)
        self._leave_session(account)
        self.pages.drop_grant_refs(account.pages)
        if account.epoch == self.tree.epoch:
            self.tree.unpin(account.node)
        self._closed.append(account.grant)

    def _leave_session(self, account: Account) -> None:
        if account.session:
            self.tiers.end_turn(account.session, self._last_state(account))

    # Forgetting

    def _bound_tree(self) -> None:
        """Drop leaves until the tree is within `max_tree_tokens`, or none can be dropped."""
        while self.tree.tokens > self.max_tree_tokens and self.allocator.evict_leaf():
            pass

    def _flush(self) -> None:
        """Forget every path and every copy below the pool.

        A lent state is freed when its loan ends. A Donate of a grant from before the flush is freed when it arrives.
        """
        nodes = self.tree.clear()
        for node in nodes:
            assert node.state is not None
            if self.ledger.loans(node.state):
                self._flushed[node] = node.state
            else:
                self.ledger.free(node.state)
        self.tiers.flush(nodes)
        self.eviction.cleared(nodes)
        self.counters["flushes"] += 1

    # Draining

    def _leaks(self) -> list[str]:
        """Return a description of each slot that is neither free nor cached or is still lent, and of each held page."""
        lost = [
            f"slot {slot}: {entry.place} by {entry.holder}"
            for slot, entry in enumerate(self.ledger.entries)
            if entry.place not in (Place.FREE, Place.CACHED) or entry.loans
        ]
        return lost + [f"page {page}: held by a grant" for page, grants in enumerate(self.pages.grant_refs) if grants]
