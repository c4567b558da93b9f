"""The cache: free slots, the radix tree of states, page counts. Decides what is matched, granted and evicted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.hints import claim_asked, denied, end_kind
from baton.actors.cache.limits import NO_TIERS, TierLimits
from baton.actors.cache.page_queue import PageQueue
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Match, Node, RadixTree, path_to_root
from baton.actors.cache.state_copy import StateCopy, copy_of
from baton.actors.cache.tiers import Tiers
from baton.actors.cache.together import Together
from baton.actors.cache.waiting import Parked, Wait, Waiting
from baton.actors.cache.worth.lives import Lives
from baton.actors.cache.worth.order import PER_TOKEN, Costs, Policy
from baton.actors.cache.worth.ranking import Ranking
from baton.actors.grants import Fill, PageCopy
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import (
    Acquire,
    Cancel,
    Cleared,
    Closed,
    Copied,
    Donate,
    Drain,
    Drained,
    Exported,
    Extend,
    Flush,
    Flushed,
    Free,
    Granted,
    Loaded,
    Message,
    Name,
    Passed,
    Refused,
    Return,
    SaveFromReq,
    Spare,
    Speeds,
    Suspend,
    Unmade,
    Unname,
    Want,
    Written,
)
from baton.actors.requests import Hit
from baton.actors.storage.disk import Disk
from baton.actors.tokens import count, cut

# How many may be granted past an Acquire that waits for room; and how many of these are tried anew each time.
MAX_OVERTAKING = 8
MAX_BLOCKED = 4


@dataclass
class Cache:
    """The cache actor: it owns the free slots, the radix tree, the page counts, the grants' accounts and session names.

    pages: the KV pool, of length 0 without attention. policy: which states go first where room is short; costs: by what
    "worth" weighs them. worth_waiting: fewer tokens that another request is computing are computed again.
    disk: None if states are not written to files.
    max_tree_tokens: bounds the tree where pages do not. Beyond it the least recently used leaves that no grant goes on
    from are evicted, with their states.
    """

    send: Send
    ledger: Ledger
    pages: PagePool
    max_tree_tokens: int = 1 << 22
    policy: Policy = "worth"
    costs: Costs = PER_TOKEN
    worth_waiting: int = 64
    limits: TierLimits = NO_TIERS
    disk: Disk | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.accounts: dict[int, Account] = {}
        self.ranking = Ranking(self.policy, self.costs, self.limits)
        self.tree: RadixTree[Lease] = RadixTree(self.pages, self.ranking.clock)
        self.order = self.ranking.of_states(self.tree)
        self.lives = Lives(self.tree, self.ranking.chances, self.order, self.counters)
        parts = self.ledger, self.pages, self.tree, self.order, self.lives
        self.tiers = Tiers(self.send, *parts, self.ranking, self.limits, self.disk)
        self.allocator = self._make_allocator()
        self.page_queue = PageQueue(self.send, self.accounts, self.pages, self.tree, self.tiers, self.allocator)
        self.waiting = Waiting(self.tiers.store, self.ranking)
        self.together = Together(self.send, self.accounts, self.tree, self.worth_waiting)
        self._flushed: dict[Node[Lease], Lease] = {}
        self._closed: list[int] = []
        self._draining = False

    def _make_allocator(self) -> Allocator:
        return Allocator(self.ledger, self.pages, self.tree, self.order, self.lives, self.tiers, self.counters)

    def receive(self, message: Message) -> None:
        match message:
            case Acquire():
                self.waiting.park(message)
            case Cancel(grant):
                if (parked := self.waiting.forget(grant)) is not None:
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
            case Exported():
                self.tiers.exported(message)
            case Unmade(key):
                self.tiers.store.unmade(key)
            case Written(key, error):
                self.tiers.written(key, error)
            case Loaded():
                self.waiting.loaded(self.tiers.loaded(message), message.error)
            case Speeds():
                self.ranking.prices.measured(message)
            case Name() | Unname() | Suspend():
                self.tiers.commands.add(message)
            case Free(leases, closes):
                for lease in leases:
                    self.ledger.free(lease)
                if closes is not None:
                    self._close(self.accounts[closes])
            case Flush(ticket):
                self._flush()
                if not self.tiers.store.ask_for_clearance(ticket):
                    self.send("api", Flushed(ticket))
            case Cleared(ticket):
                self.send("api", Flushed(ticket))
            case Drain():
                self._draining = True
                self.tiers.suspend_all()
            case _:
                raise TypeError(f"cache got {message!r}")

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
        """Answer parked Acquires, the most urgent first. A row that waits for a page comes before all.

        One that waits for room lets those pass for which there is some, though not for ever: MAX_OVERTAKING of them.
        One that waits for its copy or its predecessor keeps nobody waiting.
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
                self.waiting.forget(parked.acquire.grant)
                for earlier in blocked:
                    earlier.overtaken += 1

    def _answer(self, parked: Parked) -> Wait | None:
        """Grant or refuse; else what it waits for."""
        acquire = parked.acquire
        need = self.pages.cover(count(acquire.tokens) + 1)
        if need > len(self.pages.grant_refs):
            room = len(self.pages) * self.pages.size - 1
            text = f"{count(acquire.tokens)} tokens do not fit: the KV pages hold {room} tokens and one to generate"
            self.send("scheduler", Refused(acquire.grant, "too_large", text))
            return None
        match = self.tree.match(acquire.salt, acquire.tokens, acquire.limit)
        below = self.waiting.copy_for(parked, match.node.end)
        if below is not None and not copy_of(below).in_host:
            return Wait.COPY
        if self.together.waits(parked, below.end if below is not None else match.node.end):
            return Wait.TOGETHER
        had_state = match.node.state is not None
        if self._grant(parked, match, below, need):
            return None
        if had_state and match.node.state is None and not self.tiers.exports:
            return self._answer(parked)  # Its slot is free now.
        if self.accounts or self.tiers.exports:
            return Wait.ALLOCATION
        # With nobody else to wait for, the match itself is in the way: begin above it, and let it be evicted.
        root = Match(self.tree.match(acquire.salt, b"", 0).node, match.tokens, "evicted")
        again = root.node is not match.node and (
            (below is not None and self._grant(parked, root, below, need)) or self._grant(parked, root, None, need)
        )
        return None if again else Wait.ALLOCATION

    def _grant(self, parked: Parked, match: Match[Lease], below: Node[StateCopy] | None, need: int) -> bool:
        """Give a slot and `need` pages to go on from the match; False, with nothing kept, if there is no room."""
        acquire, node = parked.acquire, match.node
        table = self.tree.page_table(node)
        whole = node.end // self.pages.size if table else 0
        copy_source = table[whole] if whole < len(table) and below is None else None
        shared = table[:whole] if copy_source is None else table[: whole + 1]
        node.pins += 1
        self.pages.add_grant_refs(shared)
        lent = node if below is None else None
        given = self.allocator.slot_and_pages(lent, acquire.session, need - whole, reserve=len(self.accounts))
        if given is None:
            self.pages.drop_grant_refs(shared)
            self.tree.unpin(node)
            return False
        state, moved, fresh = given
        account = Account(acquire, node, self.tree.epoch, table[:whole] + fresh)
        account.copy_source = copy_source
        if moved and acquire.session in node.sessions:
            account.named = True
            self.tiers.names.unbind_from_pool(acquire.session)
        if below is not None:
            account.fill, account.tail = below, cut(acquire.tokens, node.end, below.end)
            self.tiers.store.lend(below)
            self.tiers.store.used(below)
        elif node.state is not None:
            account.loan_node, account.loan = node, self.ledger.lend(node.state)
            self.lives.used(node)
        if match.lost is not None:
            self.lives.missed(match.lost, copied=below is not None and below.end >= match.lost.end)
        self._open(account)
        self._granted(parked, account, match, state, moved)
        return True

    def _open(self, account: Account) -> None:
        self.accounts[account.grant] = account
        if account.session:
            self.tiers.begin_turn(account.session)
        self.tree.touch(account.node, with_state=account.loan is not None)
        claim_asked(account, self.lives)

    def _granted(self, parked: Parked, account: Account, match: Match[Lease], state: Lease, moved: bool) -> None:
        acquire, position = parked.acquire, account.position
        length, known = count(acquire.tokens), max(match.tokens, position)
        self.counters["prefix_cache_queries"] += length
        self.counters["prefix_cache_hits"] += position
        whole = account.node.end // self.pages.size
        origin = account.origin(moved, parked.read)
        missed = parked.miss_reason or match.miss_reason if account.fill is None else ""
        self.counters[f"granted_from:{origin}"] += 1
        if self.tiers.names.opened.get(acquire.session):
            self.counters[f"resumed_from_{origin}"] += 1
        self.send(
            "scheduler",
            Granted(
                acquire.grant,
                state,
                Hit(position, known, missed, origin),
                moved,
                account.loan,
                list(account.pages),
                None if account.copy_source is None else PageCopy(account.copy_source, account.pages[whole]),
                known if match.parts and position < known <= acquire.limit else None,
                None
                if account.fill is None
                else Fill(copy_of(account.fill).key, whole, self.pages.cover(account.fill.end)),
            ),
        )

    def _give_spares(self, want: Want) -> None:
        """Slots for those checkpoints that are worth one."""
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
        node = self.tree.insert(account.node, account.tail + donate.tokens, account.pages)
        account.tail = b""
        node.pins += 1
        self.tree.unpin(account.node)
        account.node = node
        kind = (
            end_kind(account, self.lives.end_kind(node, count(account.acquire.tokens)))
            if ends
            else account.checkpoints.pop(node.end, Kind.CHECKPOINT)
        )
        if node.state is None and node.parent is not None:
            self.ledger.cache(donate.state, node.id)
            self.tree.set_state(node, donate.state)
            self.lives.kept(node, kind)
        else:
            self.ledger.free(donate.state)
            if node.state is not None:
                self.lives.came_again(node, kind)
        self.tree.touch(node)
        claim_asked(account, self.lives)
        self.tree.deny(node, denied(account))

    def _save(self, save: SaveFromReq) -> None:
        """The turn's state is kept, and the session's name moves on to it."""
        account = self.accounts[save.grant]
        self._donate(Donate(save.grant, save.state, save.position, save.tokens, closes=False), ends=True)
        self._name(account)
        self._close(account)

    def _name(self, account: Account) -> None:
        """The name goes to the deepest state that the turn has left; on a path that was flushed there is none."""
        if account.session not in self.tiers.names.opened:
            return
        node = next((step for step in path_to_root(account.node) if step.state is not None), None)
        if node is not None and account.epoch == self.tree.epoch:
            self.tiers.names.bind_to_pool(account.session, node)

    def _undo(self, account: Account, state: Lease) -> None:
        moved_from = account.node if account.loan is None and account.position and not account.tail else None
        if moved_from is not None and account.epoch == self.tree.epoch and moved_from.state is None:
            self.allocator.put_back(moved_from, state)
            if account.named and account.session in self.tiers.names.opened:
                self.tiers.names.bind_to_pool(account.session, moved_from)
        else:
            self.ledger.free(state)
        self._end_loans(account)
        self._close(account)

    def _end_loans(self, account: Account) -> None:
        if account.loan is not None and account.loan_node is not None:
            self.ledger.end_loan(account.loan)
            lent = self._flushed.get(account.loan_node)
            if lent is not None and not self.ledger.loans(lent):
                self.ledger.free(self._flushed.pop(account.loan_node))
            self.tiers.commands.wake(account.loan_node)
            account.loan = account.loan_node = None
        if account.copy_source is not None:
            self.pages.drop_grant_refs([account.copy_source])
            account.copy_source = None
        if account.fill is not None:
            self.tiers.store.end_loan(account.fill)
            account.fill = None
        self.page_queue.loans_ended(account.grant)
        if account.closing:
            self._close(account)

    def _close(self, account: Account) -> None:
        """End an account; with a copy still under way, when that is done."""
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
        """A turn whose state was worth nothing leaves the name where it is, or at a state further up."""
        names = self.tiers.names
        if account.session:
            self.tiers.end_turn(account.session)
        if account.session in names.opened and account.session not in names.in_pool:
            if account.session not in names.stored:
                self._name(account)
            names.tell(account.session)

    # Forgetting

    def _bound_tree(self) -> None:
        while self.tree.tokens > self.max_tree_tokens and self.allocator.evict_leaf():
            pass

    def _flush(self) -> None:
        """Forget every path, and every copy below; a state that is lent goes later, an older Donate when it arrives."""
        nodes = self.tree.clear()
        for node in nodes:
            assert node.state is not None
            self.tiers.names.lost_in_pool(node)
            if self.ledger.loans(node.state):
                self._flushed[node] = node.state
            else:
                self.ledger.free(node.state)
        self.lives.cleared(nodes)
        self.tiers.store.flush()
        self.counters["flushes"] += 1

    # Draining

    def _leaks(self) -> list[str]:
        """Slots and pages that should be home and are not."""
        lost = [
            f"slot {slot}: {entry.place} by {entry.holder}"
            for slot, entry in enumerate(self.ledger.entries)
            if entry.place not in (Place.FREE, Place.CACHED) or entry.loans
        ]
        return lost + [f"page {page}: held by a grant" for page, grants in enumerate(self.pages.grant_refs) if grants]
