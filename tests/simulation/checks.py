"""Invariants of the ring. Most are checked after each delivery that can have changed them, the others at the end."""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.radix import Node
from baton.actors.lease import Lease, Place
from baton.actors.messages import Step
from baton.actors.requests import PauseMode
from baton.actors.scheduler.plan import Limits, ScheduledRow, SchedulerState, chunk_length, steady_until
from baton.actors.tokens import WIDTH, unpack
from baton.models.hash_definition import next_state
from tests.simulation.checks_of_watch import WatchChecks
from tests.simulation.checks_of_worth import check_worth
from tests.simulation.client import Exchange, Letters
from tests.simulation.hash_oracle import right_logprobs, right_pooled
from tests.simulation.scenario import Scenario

if TYPE_CHECKING:
    from tests.simulation.driver import Simulation
    from tests.simulation.unit import Unit

PLACES = tuple(Place)
IN_USE = (Place.OWNED, Place.CACHED)


def check_leases(unit: "Unit") -> None:
    """Check that the actors' lists of leases agree with the ledger.

    Each lease must be valid and belong to the actor that lists it; each slot in use must be listed exactly once. The
    ledger's own audit checks the same but is slower, so it only explains a violation that was found.
    """
    entries, counts = unit.ledger.entries, unit.ledger.counts
    claimed = set()
    sound = True
    for name, actor in unit.actors.items():
        for lease in actor.leases():
            entry = entries[lease._slot]
            at = name if entry.place is Place.OWNED else "cache"
            sound &= lease._gone is None and entry.generation == lease._generation and entry.place in IN_USE
            sound &= lease._slot not in claimed and at == name
            sound &= entry.place is Place.CACHED or entry.holder == name
            claimed.add(lease._slot)
    places = [entry.place for entry in entries]
    sound &= len(claimed) == counts[Place.OWNED] + counts[Place.CACHED]
    sound &= all(places.count(place) == counts[place] for place in PLACES)
    sound &= len(unit.ledger._free) == counts[Place.FREE]
    if not sound:
        found = unit.ledger.audit({name: actor.leases() for name, actor in unit.actors.items()})
        raise AssertionError(f"the leases differ from the ledger: {found or counts}")


def check_rows(state: SchedulerState) -> None:
    """Check the order of the rows, and recompute `steady_until` of the rows that the plan skips because of it."""
    rows = list(state.rows.values())
    assert rows == sorted(rows, key=lambda row: row.record.order), "the rows are out of order"
    for row in rows:
        if row.position < row.steady_until:
            right = steady_until(state.limits, row)
            assert row.steady_until == right, f"grant {row.grant} is steady until {row.steady_until}, right is {right}"


def check_turns(state: SchedulerState) -> None:
    """Check that Acquires are sent for the requests with the fewest requests of their flow ahead of them.

    Also check that a flow with at least two rows more than a waiting flow has retracted its last row.
    """
    if state.starved or state.paused is not None or state.closing or state.cancelled:
        return
    room = max(state.limits.max_running - len(state.rows), 0)
    rows = Counter(row.record.request.flow for row in state.rows.values())
    before, waiting = Counter(rows), []
    for record in sorted(state.queue, key=lambda record: record.order):
        flow = record.request.flow
        waiting.append((record.request.priority, before[flow], record.arrival, record))
        before[flow] += 1
    waiting.sort(key=lambda entry: entry[:3])
    due = {entry[-1].request.id for entry in waiting[:room]}
    acquiring = {record.request.id for record in state.acquiring.values()}
    assert acquiring == due, f"the cache is asked for {acquiring}, and {due} come next"
    if len(waiting) > room:
        priority, turn, *_ = waiting[room]
        for row in state.rows.values():
            late = rows[row.record.request.flow] - 1 > turn and row.record.request.priority >= priority
            assert not late, f"{row.record.request.id} does not give way to {waiting[room][-1].request.id}"


def check_shares(state: SchedulerState, step: Step) -> None:
    """Check how a step shares its tokens.

    The step must not exceed its number of tokens, a suspect row must run alone, the first prompt must advance except in
    two of eight steps, which may be timed without prompts, and decoding rows must take turns.
    """
    assert state.paused is None, f"step {step.step} is planned in a pause"
    limits, resting = state.limits, set(step.sit_out)
    decodes = [row for row in state.rows.values() if not row.prefilling and row.grant not in resting]
    moved = {row.grant for row in decodes} | {chunk.grant for chunk in step.chunks}
    tokens = len(decodes) + sum(chunk.tokens for chunk in step.chunks)
    assert tokens <= limits.step_tokens, f"step {step.step} has {tokens} tokens of {limits.step_tokens}"
    suspects = {grant for grant, row in state.rows.items() if row.position < row.record.suspect_until}
    assert not moved & suspects or len(moved) == 1, f"step {step.step} has a suspect row in company"
    together = [row for row in state.rows.values() if not row.suspect and not row.filling]
    if not moved & {row.grant for row in together}:
        return  # The step replays a suspect row; no other row can be in it.
    left = max(limits.step_tokens - len(decodes), 1)
    if decodes and state.speeds.prompt:
        # With decoding rows in the step, prompts get only as many tokens as the time budget allows.
        speeds = state.speeds
        seconds = limits.step_time or max(4 * speeds.decode, speeds.decode + 2 * speeds.mixed)
        least = 16 if step.step % 16 else 32
        left = min(left, max(int((seconds - speeds.decode - speeds.mixed) / speeds.prompt), least))
        prompts = sum(chunk.tokens for chunk in step.chunks)
        assert prompts <= left, f"step {step.step} gives prompts {prompts} tokens, and there is time for {left}"
    turns, waiting = Counter[str](), []
    for row in together:
        if row.prefilling and chunk_length(limits, row, 1):
            ready = chunk_length(limits, row, left) > 0
            waiting.append((row.record.request.priority, turns[row.record.flow], row.record.arrival, row.grant, ready))
            turns[row.record.flow] += 1
    may_be_timed = state.speeds.prompt and decodes and not step.chunks and (step.step - 1) % 8 < 2
    passed_over = list(takewhile(lambda entry: entry[-2] not in moved, sorted(waiting)))
    is_passed = any(ready for *_, ready in passed_over)
    assert may_be_timed or not is_passed, f"step {step.step} gives the first prompt no share"
    if waiting and not may_be_timed:
        check_other_flows(limits, together, step, left)
    passed = [row.served for row in together if row.grant in resting and row.may_decode]
    latest = max((row.served for row in decodes), default=0)
    assert min(passed, default=latest) >= latest, f"step {step.step} passes over a row that waits longer"


def check_other_flows(limits: Limits, together: list[ScheduledRow], step: Step, left: int) -> None:
    """Check that a quarter of the prompt tokens goes to the first prompts of other flows, the shortest first."""
    firsts: dict[str, ScheduledRow] = {}
    for row in together:
        if row.prefilling and chunk_length(limits, row, 1):
            firsts.setdefault(row.record.flow, row)
    lengths = {chunk.grant: chunk.tokens for chunk in step.chunks}
    quarter = left // 4
    for row in sorted(list(firsts.values())[1:], key=lambda row: (row.record.order[0], row.length - row.position)):
        due = min(row.length - row.position, quarter)
        quarter -= due
        missing = chunk_length(limits, row, left) and due > lengths.get(row.grant, 0)
        assert not missing, f"step {step.step} gives grant {row.grant} less than {due} tokens"


def check_paused(unit: "Unit", mode: PauseMode | None) -> None:
    """Check the promise of `Paused`: no step is in flight and, after "retract", no grant has a row or an account."""
    state = unit.scheduler.state
    if state.paused is None:
        return
    assert state.in_flight == 0, f"paused with {state.in_flight} steps under way"
    if mode == "retract":
        rows, accounts = list(unit.forward.rows), list(unit.cache.accounts)
        assert not rows and not accounts, f"all was to be given back, and grants {rows or accounts} hold what they had"


@dataclass(slots=True)
class Known:
    """A node's facts from the last time it was checked and found right."""

    start: int
    pages: list[int]
    state: Lease | None  # the lease of the node's state; None without a state
    hashes: list[int]  # the hash model's state after each of the node's tokens


class CacheChecks:
    """Checks of the cache: loans, page counts and the tree.

    Only nodes that have changed are hashed again. An unchanged node stays right, because the device refuses writes to
    slots and pages that the tree names.
    """

    def __init__(self, simulation: "Simulation", cache: Cache) -> None:
        self._device = simulation.device
        self._ledger = cache.ledger
        self._cache = cache
        self._known: dict[Node, Known] = {}
        tiers = cache.tiers
        self._watch = WatchChecks(cache, tiers.store.tree if isinstance(tiers, HostAndDisk) else None)

    def check(self) -> None:
        """Run all checks of the cache. Called after every delivery to the cache."""
        self._check_loans()
        if self._cache.pages.grant_refs:
            self._check_pages()
        self._check_tree()
        check_worth(self._cache)
        self._watch.check()

    def _check_loans(self) -> None:
        """Check that the ledger's loans equal those of the open accounts, and that each lent state still exists."""
        cache = self._cache
        loans = [account for account in cache.accounts.values() if account.loan is not None]
        assert sum(entry.loans for entry in self._ledger.entries) == len(loans), "loans differ from the accounts'"
        for account in loans:
            source = account.loan_node
            assert source is not None and account.loan is not None
            lease = source.state if source in cache.tree.states else cache._flushed.get(source)
            assert lease is not None, f"grant {account.grant} has a loan on node {source.id}, which has no state"
            assert (lease.slot, lease.generation) == (account.loan.slot, account.loan.generation)

    def _check_pages(self) -> None:
        """Compare each page's two counts (grants that use it, nodes that name it) with the accounts and the tree."""
        cache, pages = self._cache, self._cache.pages
        users, names = [0] * len(pages), [0] * len(pages)
        for account in cache.accounts.values():
            for page in account.pages:
                users[page] += 1
            if account.copy_source is not None:
                users[account.copy_source] += 1
        for page in (page for pages in cache.tiers.exports.values() for page in pages):
            users[page] += 1
        for node in cache.tree.nodes:
            for page in node.pages:
                names[page] += 1
        assert users == pages.grant_refs, "the pages' users are not the accounts and the exports"
        assert names == pages.node_refs, "the pages' names are not the tree's"
        free = sum(1 for user, name in zip(users, names, strict=True) if not user and not name)
        assert free == len(pages._free) == len(set(pages._free)), "the free pages are not those without users and nodes"
        assert pages.used == len(users) - users.count(0)

    def _check_tree(self) -> None:
        tree, known = self._cache.tree, self._known
        for node in tree.nodes:
            before = known.get(node)
            if before is None or before.start != node.start or before.pages != node.pages:
                self._check_node(node)
            elif before.state is not node.state:
                self._check_state(node, before)
        if len(known) != len(tree.nodes):
            for node in [node for node in known if node not in tree.nodes]:
                del known[node]
        assert all(node in known for node in tree.states), "a node outside the tree keeps a state"

    def _check_node(self, node: Node) -> None:
        """Hash a node's tokens again, and check its pages and its state."""
        above = self._hash_above(node)
        state, hashes = above, []
        for position, token in enumerate(unpack(node.tokens), node.start):
            state = next_state(state, token, position)
            hashes.append(state)
        known = self._known[node] = Known(node.start, list(node.pages), None, hashes)
        self._check_entries(node, hashes)
        self._check_state(node, known)

    def _hash_above(self, node: Node) -> int:
        """Check the nodes above this node, and return the hash model's state at this node's start."""
        parent, tree = node.parent, self._cache.tree
        assert parent is not None and parent.children[node.tokens[:WIDTH]] is node, f"node {node.id} is no child"
        assert node.start == parent.end
        if parent.parent is None:
            assert tree.roots.get(parent.salt) is parent, f"node {node.id} hangs on a root that was removed"
            return 0
        assert parent in tree.nodes, f"node {node.id} hangs on a node outside the tree"
        if parent not in self._known or self._known[parent].start != parent.start:
            self._check_node(parent)
        return self._known[parent].hashes[-1]

    def _check_entries(self, node: Node, hashes: list[int]) -> None:
        """Check the KV entries in the node's pages, and make the device refuse writes to them.

        If the node begins inside a page, that page must also hold the last entries of the nodes above it.
        """
        device, size = self._device, self._cache.pages.size
        if not device.entries:
            return
        first = node.start // size
        assert len(node.pages) == -(-node.end // size) - first, f"node {node.id} names {node.pages}"
        places = [page * size + offset for page in node.pages for offset in range(size)]
        own = places[node.start - first * size : node.end - first * size]
        assert [device.entries[place] for place in own] == hashes, f"node {node.id} at {node.end} names a wrong page"
        for place in own:
            device.guarded_entries[place] = 1
        # The first page's entries before the node's start belong to its ancestors. Walk up the tree to check them.
        above = node.parent
        for at in range(node.start - 1, first * size - 1, -1):
            while above is not None and at < above.start:
                above = above.parent
            assert above is not None
            right = self._known[above].hashes[at - above.start]
            assert device.entries[places[at - first * size]] == right, f"node {node.id} names a page that is not whole"
            device.guarded_entries[places[at - first * size]] = 1

    def _check_state(self, node: Node, known: Known) -> None:
        known.state = node.state
        if node.state is not None:
            assert self._device.states[node.state.slot] == known.hashes[-1], (
                f"node {node.id} at {node.end} holds a wrong state"
            )


def check_end(simulation: "Simulation") -> None:
    """Check that every request was answered once and correctly, and that every slot and page is free or cached."""
    unit, client, scenario = simulation.unit, simulation.client, simulation.scenario
    assert client.drained and not any(client.drained), f"drained with {client.drained}"
    assert not client.pausing, f"the pauses {client.pausing} were never answered"
    for exchange in client.exchanges:
        assert exchange.answers == 1, f"{exchange.request.id} was answered {exchange.answers} times"
        if exchange.end == "grammar":
            in_trouble = exchange.grammar is not None and exchange.grammar.fails(exchange.tokens)
            assert in_trouble, f"the grammar of {exchange.request.id} has not failed"
        if exchange.end == "error":
            alone = exchange.request.id in simulation.device.failed_alone
            assert alone, f"{exchange.request.id} never failed alone"
        if exchange.end in ("error", "grammar"):
            assert "injected" in str(exchange.cause), f"{exchange.request.id} failed because of {exchange.cause}"
        check_answer(exchange, scenario)
        check_logprobs(exchange)
        check_pooled(exchange)
    counts, pages = unit.ledger.counts, unit.cache.pages
    assert counts[Place.FREE] + counts[Place.CACHED] == scenario.slots, counts
    assert pages.free + pages.cached == len(pages)
    assert not unit.results.records and not unit.cache.accounts and not unit.forward.rows
    assert not unit.scheduler._records
    assert unit.ledger.violations == 0
    unit.session_checks.check_end(crashed=any(count for name, count in simulation.counters.items() if "crash" in name))


def check_answer(exchange: Exchange, scenario: Scenario) -> None:
    """Check that an answer ends at the right token, and that its text is the expected text of its tokens."""
    right, name = exchange.oracle, exchange.request.id
    shown, end, stop = expected_answer(exchange)
    letters = Letters().decode(exchange.tokens)
    if exchange.end in ("stop", "length") and len(exchange.tokens) == end:
        assert exchange.end == ("stop" if stop else "length"), f"{name} ended with {exchange.end}"
        assert exchange.text == shown, f"{name} showed {exchange.text!r} of {letters!r}, right is {shown!r}"
    elif exchange.end == "length":
        assert len(exchange.tokens) < end and at_the_limit(exchange, scenario), (
            f"{name} has {len(exchange.tokens)} tokens, not {end} of {right}"
        )
        # If a resubmission is refused after a restart, text that might begin a stop string stays undelivered.
        whole = letters.startswith(exchange.text) if exchange.resubmitted else letters == exchange.text
        assert whole, f"{name} showed {exchange.text!r} of {letters!r}"
    else:
        refused = exchange.end in ("queue_full", "draining", "too_large")
        assert not (refused and exchange.tokens), f"{name} was under way and ended with {exchange.end}"
        assert not (exchange.resubmitted and exchange.end in ("queue_full", "draining")), (
            f"{name} ended with {exchange.end}"
        )
        failed = exchange.end in ("error", "grammar")
        assert refused or exchange.left or failed, f"{name} ended with {exchange.end}"
        assert exchange.end != "too_large" or not fits(exchange, scenario), f"{name} would fit"
        assert len(exchange.tokens) <= end and letters.startswith(exchange.text), f"{name} showed {exchange.text!r}"
    if exchange.late and not exchange.left and not exchange.resubmitted:
        assert exchange.end == "draining", f"{name} came after the shutdown and ended with {exchange.end}"
    assert exchange.late or exchange.end != "draining", f"{name} came before the shutdown and ended with {exchange.end}"


def check_logprobs(exchange: Exchange) -> None:
    """Check that each output token and each requested prompt token has a log probability.

    The log probabilities of the prompt may be incomplete while the request has no output.
    """
    request, prompt = exchange.request, unpack(exchange.request.tokens)
    right = right_logprobs([*prompt, *exchange.tokens], request.prompt_len) if request.logprobs is not None else []
    assert exchange.logprobs == right, f"{request.id} has log probabilities {exchange.logprobs}, right is {right}"
    begin = request.prompt_logprobs_from
    right = right_logprobs(prompt, begin) if begin is not None else []
    found = exchange.prompt_logprobs
    assert found == right[: None if exchange.tokens else len(found)], (
        f"{request.id} has {found} of its prompt, not {right}"
    )


def check_pooled(exchange: Exchange) -> None:
    """Check that the result of pooling came once, with the first token."""
    request = exchange.request
    has_come = request.pooled is not None and bool(exchange.tokens)
    right = [right_pooled(unpack(request.tokens), request.pooled)] if has_come and request.pooled is not None else []
    assert exchange.pooled == right, f"{request.id} has pooled {exchange.pooled}, right is {right}"


def expected_answer(exchange: Exchange) -> tuple[str, int, bool]:
    """Return the text, the number of tokens and whether a stop condition ends the answer, if nothing interrupts it."""
    stops, letters = exchange.request.stops, Letters().decode(exchange.oracle)
    drawn = enumerate(exchange.oracle, 1)
    at_token = next((at for at, token in drawn if at > stops.min_tokens and token in stops.token_ids), None)
    found = [(letters.find(piece) + len(piece), piece) for piece in stops.strings if piece in letters]
    if found and (at_token is None or found[0][0] < at_token):
        end, piece = found[0]
        return letters[: end if stops.keep_stop else end - len(piece)], end, True
    if at_token is not None:
        return letters[: at_token if stops.keep_stop else at_token - 1], at_token, True
    return letters, len(letters), exchange.grammar is not None and not exchange.grammar.allowed(exchange.oracle)


def at_the_limit(exchange: Exchange, scenario: Scenario) -> bool:
    """Return whether the request fills the page pool: each position, except that of the last token, has its entry.

    A request that comes back from the queue needs an entry for the last token too.
    """
    room = scenario.room
    return room is not None and exchange.request.prompt_len + len(exchange.tokens) in (room, room + 1)


def fits(exchange: Exchange, scenario: Scenario) -> bool:
    """Return whether the page pool can hold the request's prompt and one more token."""
    return scenario.room is None or exchange.request.prompt_len + 1 <= scenario.room
