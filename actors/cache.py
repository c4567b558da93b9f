"""The cache: free slots, the radix tree of states, page counts. Decides what is matched, granted and evicted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from actors.actor import Send
from actors.lease import Lease, Ledger, Loan, Place
from actors.messages import (
    Acquire,
    Cancel,
    Closed,
    Copied,
    Donate,
    Drain,
    Drained,
    Extend,
    Extended,
    Flush,
    Flushed,
    Free,
    Granted,
    GrantPages,
    Message,
    PageCopy,
    Refused,
    Return,
    Spare,
    Want,
)
from actors.pages import Pages
from actors.radix import Match, Node, RadixTree
from actors.tokens import Tokens, count


@dataclass(slots=True)
class Account:
    """What an open grant holds of the cache: its path in the tree, its pages by index, and its loans.

    behind: tokens that the cache knows of this grant past `node`, which was there and had to go.
    """

    grant: int
    node: Node
    epoch: int
    pages: list[int]
    source: Node | None = None
    loan: Loan | None = None
    copy_source: int | None = None
    closing: bool = False
    behind: Tokens = b""

    @property
    def position(self) -> int:
        return self.node.end + count(self.behind)

    @property
    def on_loan(self) -> bool:
        return self.loan is not None or self.copy_source is not None


@dataclass
class Cache:
    """tree_tokens bounds the tree where pages do not: least recently used paths without a state are forgotten."""

    send: Send
    ledger: Ledger
    pages: Pages
    tree_tokens: int = 1 << 22
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tree = RadixTree(self.pages)
        self.accounts: dict[int, Account] = {}
        self._parked: dict[int, Acquire] = {}
        self._hungry: dict[int, None] = {}
        self._flushed: dict[Node, Lease] = {}
        self._closed: list[int] = []
        self._report_short = False
        self._slots_short = False
        self._draining = False

    def receive(self, message: Message) -> None:
        match message:
            case Acquire():
                self._parked[message.grant] = message
            case Cancel(grant):
                if self._parked.pop(grant, None):
                    self.send("scheduler", Refused(grant, "cancelled", "the request was aborted"))
            case Want(grant, count):
                self.send("scheduler", Spare(grant, count, self._spares(grant, count)))
            case Extend(grants):
                self._hungry.update(dict.fromkeys(grant for grant in grants if grant in self.accounts))
                self._report_short = True
            case Copied(grant):
                self._end_loans(self.accounts[grant])
            case Return(grant, state):
                self._undo(self.accounts[grant], state)
            case Donate():
                self._donate(message)
            case Free(slots, closes):
                for lease in slots:
                    self.ledger.free(lease)
                if closes is not None:
                    self._close(self.accounts[closes])
            case Flush(ticket):
                self._flush()
                self.send("api", Flushed(ticket))
            case Drain():
                self._draining = True
            case _:
                raise TypeError(f"cache got {message!r}")

    def act(self) -> None:
        self._feed()
        self._serve()
        for grant in self._closed:
            self.send("scheduler", Closed(grant))
        self._closed.clear()
        self._bound_tree()
        if self._draining and not self.accounts and self._astray() == 0:
            self._draining = False
            self.send("api", Drained(self._lost()))

    def leases(self) -> Iterator[Lease]:
        yield from (node.state for node in self.tree.states if node.state is not None)
        yield from self._flushed.values()

    # Granting

    def _serve(self) -> None:
        """Answer parked Acquires in order until one has to wait for room. A row that waits for a page comes first."""
        self._slots_short = False
        for acquire in list(self._parked.values()):
            if acquire.succeeds in self.accounts:
                continue
            if self._hungry or not self._answer(acquire):
                return
            del self._parked[acquire.grant]

    def _answer(self, acquire: Acquire) -> bool:
        need = self.pages.cover(count(acquire.tokens) + 1)
        if need > len(self.pages.users):
            room = len(self.pages) * self.pages.size - 1
            text = f"{count(acquire.tokens)} tokens do not fit: the KV pages hold {room} tokens and one to generate"
            self.send("scheduler", Refused(acquire.grant, "too_large", text))
            return True
        match = self.tree.match(acquire.salt, acquire.tokens, acquire.limit)
        if self._grant(acquire, match, need):
            return True
        # With nobody else to wait for, the match itself is in the way: begin cold, and let it be evicted.
        cold = Match(self.tree.match(acquire.salt, b"", 0).node, match.tokens, "evicted")
        return not self.accounts and cold.node is not match.node and self._grant(acquire, cold, need)

    def _grant(self, acquire: Acquire, match: Match, need: int) -> bool:
        """Give a slot and `need` pages to go on from the match; False, with nothing kept, if there is no room."""
        node, known = match.node, match.tokens
        table = self.tree.table(node)
        whole = node.end // self.pages.size if table else 0
        copy_source = table[whole] if whole < len(table) else None
        shared = table[: whole + 1]
        node.pins += 1
        self.pages.share(shared)
        fresh = self._fresh_pages(need - whole)
        state, moved = self._state_slot(node) if fresh is not None else (None, False)
        if state is None:
            self.pages.release(shared)
            self.pages.release(fresh or [])
            self.tree.unpin(node)
            return False
        assert fresh is not None
        account = Account(acquire.grant, node, self.tree.epoch, table[:whole] + fresh, copy_source=copy_source)
        if node.state is not None:
            account.source, account.loan = node, self.ledger.lend(node.state)
        self.accounts[acquire.grant] = account
        self.tree.touch(node)
        self.counters["prefix_cache_queries"] += count(acquire.tokens)
        self.counters["prefix_cache_hits"] += node.end
        branch = known if node.end < known < min(count(acquire.tokens), acquire.limit + 1) else None
        copy = None if copy_source is None else PageCopy(copy_source, fresh[0])
        pages = list(account.pages)
        self.send(
            "scheduler",
            Granted(acquire.grant, state, node.end, known, match.lost, moved, account.loan, pages, copy, branch),
        )
        return True

    def _fresh_pages(self, wanted: int) -> list[int] | None:
        """Pages for a new grant, beside one kept back for each open grant, which will soon want one."""
        reserve = len(self.accounts)
        if self.pages.free + self.pages.cached < wanted + reserve and wanted:
            return None
        return self._take_pages(wanted)

    def _take_pages(self, wanted: int) -> list[int] | None:
        while self.pages.free < wanted:
            if not self._evict_leaf():
                return None
        return self.pages.take(wanted)

    def _state_slot(self, node: Node) -> tuple[Lease | None, bool]:
        """A slot for a grant that goes on from node; the node's own state, moved, if no other can be had."""
        lease = self.ledger.take("cache") or self._evict_state(keep=node)
        if lease is None and node.state is not None and not self.ledger.loans(node.state):
            self.ledger.uncache(node.state, "cache")
            return self.tree.take_state(node), True
        self._slots_short = lease is None
        return lease, False

    def _spares(self, grant: int, wanted: int) -> list[Lease]:
        """Checkpoint slots; none while a request waits for a slot to run in."""
        slots: list[Lease] = []
        while len(slots) < wanted and not self._slots_short and grant in self.accounts:
            lease = self.ledger.take("cache") or self._evict_state(keep=None)
            if lease is None:
                break
            slots.append(lease)
        self.counters["checkpoints_granted"] += len(slots)
        return slots

    def _feed(self) -> None:
        """A page to each row that waits for one, in the order of asking, and word of those that still wait.

        Of one whose copy is under way there is no word yet: when that is done the page copied from may be its own.
        """
        fed: list[GrantPages] = []
        for grant in list(self._hungry):
            pages = self._take_pages(1) or self._take_from_own_path(self.accounts[grant])
            if pages is None:
                break
            self.accounts[grant].pages += pages
            fed.append(GrantPages(grant, pages))
            del self._hungry[grant]
        if fed or self._report_short:
            self._report_short = False
            short = [grant for grant in self._hungry if not self.accounts[grant].on_loan]
            self.send("scheduler", Extended(fed, short))

    def _take_from_own_path(self, account: Account) -> list[int] | None:
        """A grant that is alone may use the whole pool: what its own path names twice goes too."""
        while len(self.accounts) == 1 and account.epoch == self.tree.epoch and not account.on_loan:
            node = account.node
            if node.parent is None or node.children:
                return None
            account.node, account.behind = node.parent, node.tokens + account.behind
            self._drop(node)
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
        node = self.tree.insert(account.node, account.behind + donate.tokens, account.pages)
        account.behind = b""
        node.pins += 1
        self.tree.unpin(account.node)
        account.node = node
        if node.state is None and node.parent is not None:
            self.ledger.cache(donate.state, node.id)
            self.tree.set_state(node, donate.state)
        else:
            self.ledger.free(donate.state)
        self.tree.touch(node)

    def _undo(self, account: Account, state: Lease) -> None:
        moved_from = account.node if account.loan is None and account.position and not account.behind else None
        if moved_from is not None and account.epoch == self.tree.epoch and moved_from.state is None:
            self.ledger.cache(state, moved_from.id)
            self.tree.set_state(moved_from, state)
        else:
            self.ledger.free(state)
        self._end_loans(account)
        self._close(account)

    def _end_loans(self, account: Account) -> None:
        if account.loan is not None and account.source is not None:
            self.ledger.end_loan(account.loan)
            lent = self._flushed.get(account.source)
            if lent is not None and not self.ledger.loans(lent):
                self.ledger.free(self._flushed.pop(account.source))
            account.loan = account.source = None
        if account.copy_source is not None:
            self.pages.release([account.copy_source])
            account.copy_source = None
        self._report_short |= account.grant in self._hungry
        if account.closing:
            self._close(account)

    def _close(self, account: Account) -> None:
        """End an account; with a copy still under way, when that is done."""
        account.closing = True
        if account.on_loan:
            return
        del self.accounts[account.grant]
        self._hungry.pop(account.grant, None)
        self._report_short |= bool(self._hungry)
        self.pages.release(account.pages)
        if account.epoch == self.tree.epoch:
            self.tree.unpin(account.node)
        self._closed.append(account.grant)

    # Evicting

    def _evict_state(self, keep: Node | None) -> Lease | None:
        """The slot of the least recently used state that is not lent."""
        for node in self.tree.states:
            assert node.state is not None
            if node is not keep and not self.ledger.loans(node.state):
                self.counters["evicted_states"] += 1
                node.evicted = True
                self.ledger.free(self.tree.take_state(node))
                return self.ledger.take("cache")
        return None

    def _evict_leaf(self) -> bool:
        """Drop the least recently used leaf that no open grant goes on from, and its state."""
        for node in self.tree.nodes:
            if not node.children and not node.pins:
                self._drop(node)
                return True
        return False

    def _drop(self, leaf: Node) -> None:
        if leaf.state is not None:
            self.ledger.free(self.tree.take_state(leaf))
            self.counters["evicted_states"] += 1
        self.counters["evicted_pages"] += len(leaf.pages)
        self.tree.remove(leaf)

    def _bound_tree(self) -> None:
        while self.tree.tokens > self.tree_tokens and self._evict_leaf():
            pass

    def _flush(self) -> None:
        """Forget every path; a state that is lent goes when its loan ends, an older Donate when it arrives."""
        for node in self.tree.clear():
            assert node.state is not None
            if self.ledger.loans(node.state):
                self._flushed[node] = node.state
            else:
                self.ledger.free(node.state)
        self.counters["flushes"] += 1

    # Draining

    def _astray(self) -> int:
        """Slots that are on their way."""
        return self.ledger.counts[Place.TRANSIT]

    def _lost(self) -> list[str]:
        """Slots and pages that should be home and are not."""
        lost = [
            f"slot {slot}: {entry.place} by {entry.holder}"
            for slot, entry in enumerate(self.ledger.entries)
            if entry.place not in (Place.FREE, Place.CACHED) or entry.loans
        ]
        return lost + [f"page {page}: held by a grant" for page, users in enumerate(self.pages.users) if users]
