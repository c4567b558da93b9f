"""Planted bugs in slots, leases, loans, pages and the tree, and in the order of the device's stream."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.cache import actor as cache_actor
from baton.actors.cache.actor import Account, Cache
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Match, Node, RadixTree
from baton.actors.forward.actor import Forward, LaunchedStep
from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.device import Work, WorkCheckpoint
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Admit, Copied, Donate, Free, Granted, Retire, Retired
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.rows import RunningRows
from baton.actors.tokens import WIDTH
from tests.simulation import driver
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def no_clear_on_reuse(patch: Patch) -> None:
    """Planted bug: a fresh slot is not cleared, so the next request starts from an old state."""
    patch(HashDevice, "clear", lambda self, slot: None)


def state_copied_ahead_of_the_stream(patch: Patch) -> None:
    """Planted bug: a cached state is copied at once, before the steps that are enqueued ahead of the copy."""
    patch(HashDevice, "copy", HashDevice._copy)


def page_copied_ahead_of_the_stream(patch: Patch) -> None:
    """Planted bug: a page is copied at once, before the steps that are enqueued ahead of the copy."""
    patch(HashDevice, "copy_page", HashDevice._copy_page)


def donated_at_the_next_position(patch: Patch) -> None:
    """Planted bug: a state is donated as if it had consumed one more token."""
    original = ResultProcessor._donate

    def donate(self: ResultProcessor, record: RequestHistory, state: Lease, position: int, closes: bool) -> None:
        original(self, record, state, min(position + 1, len(record.history)), closes)

    patch(ResultProcessor, "_donate", donate)


def account_closed_in_flight(patch: Patch) -> None:
    """Planted bug: the pages of a row are freed when it is retired, while a step that uses them is in flight."""
    retire, original = RunningRows.retire, Cache.receive

    def early(self: RunningRows, grant: int, reason: str) -> None:
        running = grant in self.state.rows
        retire(self, grant, reason)
        if running:
            self.send("cache", Free([], closes_grant=grant))

    def receive(self: Cache, message: Any) -> None:
        if isinstance(message, Free) and not message.leases:  # sent by `early`
            account = self.accounts.get(message.closes_grant or 0)
            if account is not None:
                self.pages.drop_grant_refs(account.pages)
                account.pages = []
        elif isinstance(message, Donate) and self.pages.grant_refs and not self.accounts[message.grant].pages:
            original(self, Free([message.state], closes_grant=message.grant if message.closes else None))
        else:
            original(self, message)

    patch(RunningRows, "retire", early)
    patch(Cache, "receive", receive)


def loan_not_returned(patch: Patch) -> None:
    """Planted bug: forward does not report that a lent state has been copied."""

    def admit(self: Forward, message: Admit) -> None:
        send = self.send
        self.send = lambda to, sent: None if isinstance(sent, Copied) and message.loan is not None else send(to, sent)
        original(self, message)
        self.send = send

    original = Forward._admit
    patch(Forward, "_admit", admit)


def loan_ended_twice(patch: Patch) -> None:
    """Planted bug: a loan ends when its copy is enqueued, and again when the account closes."""
    end, close = Cache._end_loans, Cache._close
    ended: dict[tuple[int, int], Any] = {}

    def end_loans(self: Cache, account: Account) -> None:
        if account.loan is not None:
            ended[id(self), account.grant] = account.loan
        end(self, account)

    def close_account(self: Cache, account: Account) -> None:
        loan = ended.pop((id(self), account.grant), None)
        if loan is not None:
            self.ledger.end_loan(loan)
        close(self, account)

    patch(Cache, "_end_loans", end_loans)
    patch(Cache, "_close", close_account)


def eviction_under_a_loan(patch: Patch) -> None:
    """Planted bug: a state is evicted while it is lent."""
    patch(Allocator, "_is_evictable", lambda self, node: node.state is not None)


def generation_not_bumped(patch: Patch) -> None:
    """Planted bug: a slot is handed out again under the generation of its last lease."""

    def take(self: Ledger, holder: str) -> Lease | None:
        if not self._free:
            return None
        slot = self._free.pop()
        entry = self.entries[slot]
        entry.generation = max(entry.generation, 1)
        self._place(slot, Place.OWNED, holder, "take")
        return Lease(slot, entry.generation, self)

    patch(Ledger, "take", take)


def checkpoint_of_another_row(patch: Patch) -> None:
    """Planted bug: the checkpoints of a step are assigned to rows in order, instead of to the rows that they name."""
    original = HashDevice.run

    def run(self: HashDevice, work: Work) -> None:
        rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
        pairs = zip(work.checkpoints, rows, strict=False)
        mixed = [WorkCheckpoint(row, checkpoint.position, checkpoint.slot) for checkpoint, row in pairs]
        original(self, replaced(work, checkpoints=mixed))

    patch(HashDevice, "run", run)


def checkpoint_at_the_end_of_the_chunk(patch: Patch) -> None:
    """Planted bug: a checkpoint is taken at the end of the chunk instead of at its position."""
    original = HashDevice._consume

    def consume(self: HashDevice, row: Any, start: int, stop: int, checkpoints: dict[int, int]) -> None:
        original(self, row, start, stop, {})
        for slot in checkpoints.values():
            self._write(slot, self.states[row.slot])

    patch(HashDevice, "_consume", consume)


def state_of_an_overrun_reported_too_early(patch: Patch) -> None:
    """Planted bug: a finished row that ran one extra step is reported one position too early for the state it holds."""
    original = Forward._retire

    def retire(self: Forward, message: Retire) -> None:
        is_overrun = message.reason == "finished" and any(isinstance(each, LaunchedStep) for each in self._reports)
        original(self, message)
        if is_overrun and isinstance(report := self._reports[-1], Retired):
            report.position -= 1

    patch(Forward, "_retire", retire)


def shared_page_not_copied(patch: Patch) -> None:
    """Planted bug: a request that resumes inside a shared page appends to that page instead of to a copy of it."""
    _resume_in_place(patch, lambda admit: True)


def moved_state_appends_to_a_shared_page(patch: Patch) -> None:
    """Planted bug: a request that gets a moved state appends to that state's last page, which a fork may share."""
    _resume_in_place(patch, lambda admit: admit.moved)


def _resume_in_place(patch: Patch, when: Callable[[Admit], bool]) -> None:
    """Make forward use the source of a page copy instead of the copy, for every `Admit` for which `when` is true."""
    original = Forward._admit

    def admit(self: Forward, message: Admit) -> None:
        copy = message.page_copy
        if copy is not None and when(message):
            message.pages = [copy.source if page == copy.target else page for page in message.pages]
            message.page_copy = None
            if message.loan is None:
                self.send("cache", Copied(message.grant))
        original(self, message)

    patch(Forward, "_admit", admit)


def page_of_a_node_freed(patch: Patch) -> None:
    """Planted bug: a page is freed as soon as no request uses it, although a node of the tree names it."""

    def release(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            self.grant_refs[page] -= 1
            self.used -= not self.grant_refs[page]
            if not self.grant_refs[page]:
                self.node_refs[page] = 0
                self._reclaim(page)

    patch(PagePool, "drop_grant_refs", release)


def refused_send_moves_leases(patch: Patch) -> None:
    """Planted bug: a send moves its leases one by one, and stops at the first dead one instead of moving none."""

    def depart(message: Any, sender: str, receiver: str, ledger: Ledger) -> None:
        if isinstance(message, Free):
            message.leases = [ledger.depart(lease, sender, receiver, "Free") for lease in message.leases]
        else:
            original(message, sender, receiver, ledger)

    original = driver.depart
    patch(driver, "depart", depart)


def resumed_past_the_state(patch: Patch) -> None:
    """Planted bug: a request resumes where its tokens leave the tree, instead of at the position of the state."""
    original = Scheduler._granted

    def granted(self: Scheduler, message: Granted) -> None:
        record = self.state.acquiring.get(message.grant)
        if record is not None and message.hit.cached_tokens:
            end = min(message.hit.matched_tokens, len(record.request.tokens) // WIDTH - 1)
            message.hit = replaced(message.hit, cached_tokens=end)
        original(self, message)

    patch(Scheduler, "_granted", granted)


def match_past_the_limit(patch: Patch) -> None:
    """Planted bug: a cached state at the very end of the prompt is used, which leaves no token to feed."""
    original = RadixTree.match

    def match(self: RadixTree, salt: str, tokens: bytes, limit: int) -> Match:
        return original(self, salt, tokens, limit + 1)

    patch(RadixTree, "match", match)


def epoch_ignored(patch: Patch) -> None:
    """Planted bug: a state that is donated after a flush is stored below a node that the flush has removed."""
    original = Cache._donate

    def donate(self: Cache, message: Donate, ends: bool) -> None:
        account = self.accounts[message.grant]
        if account.epoch != self.tree.epoch:
            account.epoch = self.tree.epoch
        original(self, message, ends)

    patch(Cache, "_donate", donate)


def page_dropped_at_a_split(patch: Patch) -> None:
    """Planted bug: when a node is split inside a page, only the upper half names that page."""
    original = RadixTree._split

    def split(self: RadixTree, node: Node, length: int) -> Node:
        upper = original(self, node, length)
        if upper.pages and node.pages and upper.pages[-1] == node.pages[0] and len(node.pages) > 1:
            self.pages.drop_node_refs(node.pages[:1])
            del node.pages[0]
        return upper

    patch(RadixTree, "_split", split)


def pages_evicted_without_a_slot(patch: Patch) -> None:
    """Planted bug: pages are evicted for a grant before it is known whether it gets a slot."""
    original = Allocator.slot_and_pages

    def slot_and_pages(self: Allocator, node: Any, session: str, pages: int, reserve: int) -> Any:
        self._pages.drop_grant_refs(self.take_pages(pages) or [])
        return original(self, node, session, pages, reserve)

    patch(Allocator, "slot_and_pages", slot_and_pages)


def blocked_acquire_blocks_all(patch: Patch) -> None:
    """Planted bug: an Acquire that waits for room also blocks later ones for which there is room."""
    patch(cache_actor, "MAX_BLOCKED", 1)


def row_runs_without_its_set_up(patch: Patch) -> None:
    """Planted bug: an error while a row is set up is dropped, and the row runs on whatever its slot and pages hold."""
    patch(ContainedDevice, "_set_up", lambda self, call: self._error_of(call))


def moved_state_freed(patch: Patch) -> None:
    """Planted bug: a cached state that was moved to a request is freed if the request ends before its first step."""
    original = ResultProcessor._give_back_state

    def give_back(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        if record.moved and retired.position == record.start and not record.request.session:
            self.send("cache", Free([retired.state], closes_grant=retired.grant))
        else:
            original(self, record, retired, is_wanted)

    patch(ResultProcessor, "_give_back_state", give_back)
