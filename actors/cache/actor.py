"""The cache: free slots, the radix tree of states, page counts. Decides what is matched, granted and evicted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from actors.actor import Send
from actors.cache.account import Account
from actors.cache.allocator import Allocator
from actors.cache.copies import NO_TIERS, TierLimits
from actors.cache.pages import PagePool
from actors.cache.radix import Match, Node, RadixTree, path_to_root
from actors.cache.state_copy import StateCopy, copy_of
from actors.cache.tiers import Tiers
from actors.cache.waiting import Parked, Wait, Waiting
from actors.grants import Fill, GrantPages, PageCopy
from actors.lease import Lease, Ledger, Place
from actors.messages import (
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
    Extended,
    Flush,
    Flushed,
    Free,
    Granted,
    Loaded,
    Message,
    Name,
    Refused,
    Return,
    SaveFromReq,
    Spare,
    Suspend,
    Unmade,
    Unname,
    Want,
    Written,
)
from actors.requests import Origin
from actors.storage.disk import Disk
from actors.tokens import count, cut

# How many may be granted past an Acquire that waits for room; and how many of these are tried anew each time.
MAX_OVERTAKING = 8
MAX_BLOCKED = 4


@dataclass
class Cache:
    """The cache actor: it owns the free slots, the radix tree, the page counts, the grants' accounts and session names.

    pages: the KV pool, of length 0 without attention. disk: None if states are not written to files.
    max_tree_tokens: bounds the tree where pages do not. Beyond it the least recently used leaves that no grant goes on
    from are evicted, with their states.
    """

    send: Send
    ledger: Ledger
    pages: PagePool
    max_tree_tokens: int = 1 << 22
    limits: TierLimits = NO_TIERS
    disk: Disk | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tree: RadixTree[Lease] = RadixTree(self.pages)
        self.accounts: dict[int, Account] = {}
        self.tiers = Tiers(self.send, self.ledger, self.pages, self.tree, self.limits, self.disk)
        self.allocator = Allocator(self.ledger, self.pages, self.tree, self.tiers, self.counters)
        self.waiting = Waiting(self.tiers.store)
        self._page_waiters: dict[int, None] = {}
        self._flushed: dict[Node[Lease], Lease] = {}
        self._closed: list[int] = []
        self._report_starved = False
        self._draining = False

    def receive(self, message: Message) -> None:
        match message:
            case Acquire():
                self.waiting.park(message)
            case Cancel(grant):
                if self.waiting.forget(grant):
                    self.send("scheduler", Refused(grant, "cancelled", "the request was aborted"))
            case Want(grant, count):
                self.send("scheduler", Spare(grant, count, self._spares(grant, count)))
            case Extend(grants):
                self._page_waiters.update(dict.fromkeys(grant for grant in grants if grant in self.accounts))
                self._report_starved = True
            case Copied(grant):
                self._end_loans(self.accounts[grant])
            case Return(grant, state):
                self._undo(self.accounts[grant], state)
            case Donate():
                self._donate(message)
            case SaveFromReq():
                self._save(message)
            case Exported():
                self.tiers.exported(message)
            case Unmade(key):
                self.tiers.store.unmade(key)
            case Written(key, error):
                self.tiers.written(key, error)
            case Loaded(key, error):
                self.waiting.loaded(self.tiers.store.loaded(key, error), error)
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
        self._give_pages()
        self._serve()
        self.tiers.keep_a_slot_free()
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
            if self._page_waiters or len(blocked) == MAX_BLOCKED:
                return
            if any(earlier.overtaken >= MAX_OVERTAKING for earlier in blocked):
                return
            if parked.acquire.predecessor in self.accounts:
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
        account = Account(acquire.grant, node, self.tree.epoch, table[:whole] + fresh, acquire.session)
        account.copy_source = copy_source
        if moved:
            account.named = acquire.session in node.sessions
            self.tiers.names.unbind_from_pool(acquire.session)
        if below is not None:
            account.fill, account.tail = below, cut(acquire.tokens, node.end, below.end)
            self.tiers.store.lend(below)
        elif node.state is not None:
            account.loan_node, account.loan = node, self.ledger.lend(node.state)
        self._open(account)
        self._granted(parked, account, match, state, moved)
        return True

    def _open(self, account: Account) -> None:
        self.accounts[account.grant] = account
        if account.session:
            self.tiers.begin_turn(account.session)
        self.tree.touch(account.node)

    def _granted(self, parked: Parked, account: Account, match: Match[Lease], state: Lease, moved: bool) -> None:
        acquire, position = parked.acquire, account.position
        length, known = count(acquire.tokens), max(match.tokens, position)
        self.counters["prefix_cache_queries"] += length
        self.counters["prefix_cache_hits"] += position
        whole = account.node.end // self.pages.size
        origin = _origin(parked, account, moved)
        if self.tiers.names.opened.get(acquire.session):
            self.counters[f"resumed_from_{origin}"] += 1
        self.send(
            "scheduler",
            Granted(
                acquire.grant,
                state,
                position,
                known,
                parked.miss_reason or match.miss_reason if account.fill is None else "",
                moved,
                account.loan,
                list(account.pages),
                None if account.copy_source is None else PageCopy(account.copy_source, account.pages[whole]),
                known if position < known < min(length, acquire.limit + 1) else None,
                None if account.fill is None else Fill(copy_of(account.fill).key, whole),
                origin,
            ),
        )

    def _spares(self, grant: int, wanted: int) -> list[Lease]:
        """Checkpoint slots; none while a request waits for a slot to run in."""
        slots: list[Lease] = []
        while len(slots) < wanted and not self.allocator.grant_waits_for_slot and grant in self.accounts:
            lease = self.allocator.spare_slot()
            if lease is None:
                break
            slots.append(lease)
        self.counters["checkpoints_granted"] += len(slots)
        return slots

    def _give_pages(self) -> None:
        """A page to each row that waits for one, in the order of asking, and word of those that still wait.

        Of one whose copy is under way there is no word yet: when that is done the page copied from may be its own. Nor
        of any while a state leaves the pool, and its pages with it: an earlier word of them is taken back.
        """
        fed: list[GrantPages] = []
        for grant in list(self._page_waiters):
            pages = self.allocator.take_pages(1) or self._take_from_own_path(self.accounts[grant])
            if pages is None:
                break
            self.accounts[grant].pages += pages
            fed.append(GrantPages(grant, pages))
            del self._page_waiters[grant]
        if self.tiers.exports and self._page_waiters:
            if fed or self._report_starved:
                self.send("scheduler", Extended(fed, []))
            self._report_starved = True
        elif fed or self._report_starved:
            self._report_starved = False
            short = [grant for grant in self._page_waiters if not self.accounts[grant].on_loan]
            self.send("scheduler", Extended(fed, short))

    def _take_from_own_path(self, account: Account) -> list[int] | None:
        """A grant that is alone may use the whole pool: what its own path names twice goes too."""
        alone = len(self.accounts) == 1 and not self.tiers.exports
        while alone and account.epoch == self.tree.epoch and not account.on_loan:
            node = account.node
            if node.parent is None or node.children:
                return None
            account.node, account.tail = node.parent, node.tokens + account.tail
            self.allocator.drop(node)
            if self.tiers.exports:
                return None
            if self.pages.free:
                return self.pages.take(1)
        return None

    # Giving back

    def _donate(self, donate: Donate) -> None:
        account = self.accounts[donate.grant]
        if account.epoch != self.tree.epoch:
            self.ledger.free(donate.state)
        elif account.position + count(donate.tokens) != donate.position:
            self.ledger.quarantine(
                donate.state.slot,
                f"donated at {donate.position} with {count(donate.tokens)} tokens since {account.position}",
            )
            donate.state.surrender("quarantined")
        else:
            self._keep(account, donate)
        if donate.closes:
            self._close(account)

    def _keep(self, account: Account, donate: Donate) -> None:
        node = self.tree.insert(account.node, account.tail + donate.tokens, account.pages)
        account.tail = b""
        node.pins += 1
        self.tree.unpin(account.node)
        account.node = node
        if node.state is None and node.parent is not None:
            self.ledger.cache(donate.state, node.id)
            self.tree.set_state(node, donate.state)
        else:
            self.ledger.free(donate.state)
        self.tree.touch(node)

    def _save(self, save: SaveFromReq) -> None:
        """The turn's state is kept, and the session's name moves on to it."""
        account = self.accounts[save.grant]
        self._donate(Donate(save.grant, save.state, save.position, save.tokens, closes=False))
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
            self.ledger.cache(state, moved_from.id)
            self.tree.set_state(moved_from, state)
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
        self._report_starved |= account.grant in self._page_waiters
        if account.closing:
            self._close(account)

    def _close(self, account: Account) -> None:
        """End an account; with a copy still under way, when that is done."""
        account.closing = True
        if account.on_loan:
            return
        del self.accounts[account.grant]
        self._page_waiters.pop(account.grant, None)
        self._report_starved |= bool(self._page_waiters)
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
        for node in self.tree.clear():
            assert node.state is not None
            self.tiers.names.lost_in_pool(node)
            if self.ledger.loans(node.state):
                self._flushed[node] = node.state
            else:
                self.ledger.free(node.state)
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


def _origin(parked: Parked, account: Account, moved: bool) -> Origin:
    if account.fill is not None:
        return "disk" if parked.read else "host"
    if moved:
        return "slot"
    return "tree" if account.position else "tokens"
