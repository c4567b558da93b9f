"""Hypothesis state machines that compare the ledger, the radix tree and the page table with simple models."""

import gc
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.actors.cache.pages import PageError, PagePool
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.lease import Lease, LeaseError, Ledger, Loan, Place
from baton.actors.messages import Free
from baton.actors.runtime.transport import arrive, depart
from baton.actors.tokens import pack, unpack

BOUNDED = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
SLOTS, PAGES = 5, 9
HOLDERS = st.sampled_from(["cache", "scheduler", "forward", "results"])
PICK = st.integers(0, 2**16)


@dataclass
class Held:
    """The model's record of a slot that is not free."""

    lease: Lease
    place: Place
    holder: str
    generation: int
    loans: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """A model of the ledger: slots in `held` are in use, slots in `miss_reason` are quarantined, others are free."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SLOTS)
        self.held: dict[int, Held] = {}
        self.miss_reason: dict[int, int] = {}
        self.generations = [0] * SLOTS
        self.travelling: dict[int, Free] = {}
        self.loans: list[tuple[int, Loan]] = []
        self.dead: list[Lease] = []

    def pick(self, place: Place, at: int) -> int | None:
        slots = [slot for slot, held in self.held.items() if held.place is place]
        return slots[at % len(slots)] if slots else None

    @rule(holder=HOLDERS)
    def take(self, holder: str) -> None:
        lease = self.ledger.take(holder)
        if lease is None:
            assert len(self.held) + len(self.miss_reason) == SLOTS
            return
        slot = lease.slot
        assert slot not in self.held and slot not in self.miss_reason
        self.generations[slot] += 1
        assert lease.generation == self.generations[slot]
        self.held[slot] = Held(lease, Place.OWNED, holder, lease.generation)

    @rule(at=PICK, receiver=HOLDERS)
    def send(self, at: int, receiver: str) -> None:
        slot = self.pick(Place.OWNED, at)
        if slot is None:
            return
        held = self.held[slot]
        message = Free([held.lease])
        depart(message, held.holder, receiver, self.ledger)
        self.dead.append(held.lease)
        held.lease, held.place = message.leases[0], Place.TRANSIT
        held.holder = f"{held.holder} → {receiver}"
        self.travelling[slot] = message

    @rule(at=PICK)
    def receive(self, at: int) -> None:
        slot = self.pick(Place.TRANSIT, at)
        if slot is None:
            return
        held = self.held[slot]
        receiver = held.holder.split(" → ")[1]
        arrive(self.travelling.pop(slot), receiver, self.ledger)
        held.place, held.holder = Place.OWNED, receiver

    @rule(at=PICK, node=st.integers(0, 99))
    def cache(self, at: int, node: int) -> None:
        slot = self.pick(Place.OWNED, at)
        if slot is not None:
            self.ledger.cache(self.held[slot].lease, node)
            self.held[slot].place, self.held[slot].holder = Place.CACHED, f"node {node}"

    @rule(at=PICK)
    def lend(self, at: int) -> None:
        slot = self.pick(Place.CACHED, at)
        if slot is not None:
            self.loans.append((slot, self.ledger.lend(self.held[slot].lease)))
            self.held[slot].loans += 1

    @precondition(lambda self: self.loans)
    @rule(at=PICK)
    def end_loan(self, at: int) -> None:
        slot, loan = self.loans.pop(at % len(self.loans))
        self.ledger.end_loan(loan)
        self.held[slot].loans -= 1
        if not self.held[slot].loans:
            with pytest.raises(LeaseError, match="ended before"):
                self.ledger.end_loan(loan)

    @rule(at=PICK, holder=HOLDERS)
    def uncache(self, at: int, holder: str) -> None:
        slot = self.pick(Place.CACHED, at)
        if slot is None:
            return
        held = self.held[slot]
        if held.loans:
            with pytest.raises(LeaseError, match="loans"):
                self.ledger.uncache(held.lease, holder)
        else:
            self.ledger.uncache(held.lease, holder)
            held.place, held.holder = Place.OWNED, holder

    @rule(at=PICK, place=st.sampled_from([Place.OWNED, Place.CACHED, Place.TRANSIT]))
    def free(self, at: int, place: Place) -> None:
        slot = self.pick(place, at)
        if slot is None:
            return
        held = self.held[slot]
        if held.loans or place is Place.TRANSIT:
            with pytest.raises(LeaseError):
                self.ledger.free(held.lease)
        else:
            self.ledger.free(held.lease)
            self.dead.append(held.lease)
            del self.held[slot]

    @precondition(lambda self: len(self.miss_reason) < SLOTS - 2)
    @rule(at=PICK)
    def drop(self, at: int) -> None:
        """Let a live handle be garbage-collected: the ledger then quarantines its slot."""
        slot = self.pick(Place.OWNED, at)
        if slot is None:
            return
        self.miss_reason[slot] = self.held.pop(slot).generation
        gc.collect(0)

    @precondition(lambda self: len(self.miss_reason) < SLOTS - 2)
    @rule(slot=st.integers(0, SLOTS - 1))
    def quarantine_a_free_slot(self, slot: int) -> None:
        if slot not in self.held and slot not in self.miss_reason:
            self.ledger.quarantine(slot, "a test")
            self.miss_reason[slot] = self.generations[slot]

    @precondition(lambda self: self.dead)
    @rule(at=PICK)
    def a_dead_handle_is_refused(self, at: int) -> None:
        lease = self.dead[at % len(self.dead)]
        for use in (self.ledger.free, lambda gone: self.ledger.cache(gone, 1), self.ledger.lend):
            with pytest.raises(LeaseError):
                use(lease)

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        for slot, entry in enumerate(self.ledger.entries):
            if slot in self.held:
                held = self.held[slot]
                known = (held.place, held.holder, held.generation, held.loans)
            elif slot in self.miss_reason:
                known = (Place.QUARANTINED, "nobody", self.miss_reason[slot], 0)
            else:
                known = (Place.FREE, "pool", self.generations[slot], 0)
            assert (entry.place, entry.holder, entry.generation, entry.loans) == known
        assert +self.ledger.counts == Counter(entry.place for entry in self.ledger.entries)
        assert self.ledger.violations == len(self.miss_reason)

    @invariant()
    def the_audit_agrees_and_misses_what_is_withheld(self) -> None:
        holdings: dict[str, list[Lease]] = {}
        for held in self.held.values():
            if held.place is not Place.TRANSIT:
                holdings.setdefault("cache" if held.place is Place.CACHED else held.holder, []).append(held.lease)
        assert self.ledger.audit(holdings) == []
        for holder, leases in holdings.items():
            fewer = holdings | {holder: leases[1:]}
            assert [violation.slot for violation in self.ledger.audit(fewer)] == [leases[0].slot]

    def teardown(self) -> None:
        self.ledger.close()


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(PAGES, 4)
        self.grants: Counter[int] = Counter()
        self.nodes: Counter[int] = Counter()

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > self.pages.free:
            with pytest.raises(PageError, match=f"{count} pages wanted"):
                self.pages.take(count)
            return
        pages = self.pages.take(count)
        assert len(set(pages)) == count and not any(self.grants[page] or self.nodes[page] for page in pages)
        self.grants.update(pages)

    @rule(page=st.integers(0, PAGES - 1), whose=st.sampled_from(["grants", "nodes"]))
    def one_more(self, page: int, whose: str) -> None:
        add = self.pages.add_grant_refs if whose == "grants" else self.pages.add_node_refs
        if self.grants[page] or self.nodes[page]:
            add([page])
            getattr(self, whose)[page] += 1
        else:
            with pytest.raises(PageError, match="free"):
                add([page])

    @rule(page=st.integers(0, PAGES - 1), whose=st.sampled_from(["grants", "nodes"]))
    def one_fewer(self, page: int, whose: str) -> None:
        drop = self.pages.drop_grant_refs if whose == "grants" else self.pages.drop_node_refs
        if getattr(self, whose)[page]:
            drop([page])
            getattr(self, whose)[page] -= 1
        else:
            with pytest.raises(PageError):
                drop([page])

    @invariant()
    def the_table_is_the_model(self) -> None:
        pages = self.pages
        assert pages.grant_refs == [self.grants[page] for page in range(PAGES)]
        assert pages.node_refs == [self.nodes[page] for page in range(PAGES)]
        used, cached = set(+self.grants), set(+self.nodes)
        assert (pages.free, pages.used, pages.cached) == (PAGES - len(used | cached), len(used), len(cached - used))


Path = tuple[int, ...]
SEQUENCE = st.lists(st.integers(0, 1), min_size=0, max_size=9)
SALTS = st.sampled_from(["", "tenant"])


class TreeMachine(RuleBasedStateMachine):
    """A model of the radix tree: sets of (salt, path) for known prefixes, node ends, states and evicted states.

    `written` maps each page to the path that each of its entries was written for.
    The pages that a node names must hold exactly the node's path.
    """

    @initialize(page_size=st.integers(1, 4))
    def begin(self, page_size: int) -> None:
        self.pages, self.ledger = PagePool(200, page_size), Ledger(60)
        self.tree = RadixTree(self.pages)
        self.written: dict[int, list[Path | None]] = {}
        self.forget()

    def forget(self) -> None:
        self.known: set[tuple[str, Path]] = set()
        self.ends: set[tuple[str, Path]] = set()
        self.states: set[tuple[str, Path]] = set()
        self.evicted: set[tuple[str, Path]] = set()
        self.pinned: list[Node] = []

    def nodes(self) -> list[Node]:
        return list(self.tree.nodes)

    def root(self, salt: str) -> Node:
        return self.tree.match(salt, b"", 0).node

    @rule(salt=SALTS, tokens=SEQUENCE, at=PICK, keep=st.booleans(), pin=st.booleans())
    def insert(self, salt: str, tokens: list[int], at: int, keep: bool, pin: bool) -> None:
        """Insert a path as a grant does: start at a node, share whole pages, copy a partial page, add fresh pages."""
        starts = [self.root(salt), *(node for node in self.nodes() if key(node)[0] == salt)]
        start = starts[at % len(starts)]
        before, size = key(start)[1], self.pages.size
        goal = (*before, *tokens)
        whole = len(before) // size
        table = self.tree.page_table(start)
        shared, cut = table[:whole], table[whole : whole + 1]
        self.pages.add_grant_refs(shared)
        fresh = self.pages.take(self.pages.cover(len(goal)) - whole)
        for page in fresh:
            self.written[page] = [None] * size
        if cut and fresh:
            self.written[fresh[0]] = list(self.written[cut[0]])
        for position in range(len(before), len(goal)):
            self.written[(shared + fresh)[position // size]][position % size] = goal[: position + 1]
        node = self.tree.insert(start, pack(tokens), shared + fresh)
        self.pages.drop_grant_refs(shared + fresh)
        assert key(node) == (salt, goal)
        self.learn(salt, goal)
        if keep and goal:
            self.keep_state(node)
        self.tree.touch(node)
        if pin and goal:
            node.pins += 1
            self.pinned.append(node)

    def keep_state(self, node: Node) -> None:
        if node.state is None and (lease := self.ledger.take("cache")) is not None:
            self.ledger.cache(lease, node.id)
            self.tree.set_state(node, lease)
            self.states.add(key(node))
            self.evicted.discard(key(node))

    @precondition(lambda self: self.evicted)
    @rule(at=PICK)
    def keep_an_evicted_state_again(self, at: int) -> None:
        gone = [node for node in self.nodes() if node.evicted]
        self.keep_state(gone[at % len(gone)])

    def learn(self, salt: str, goal: Path) -> None:
        """Record the nodes that an insert creates: one where `goal` leaves the known tokens, and one at its end."""
        parting = max((n for n in range(len(goal) + 1) if (salt, goal[:n]) in self.known), default=0)
        self.ends |= {(salt, goal[:n]) for n in (parting, len(goal)) if n}
        self.known |= {(salt, goal[:n]) for n in range(1, len(goal) + 1)}

    @rule(salt=SALTS, tokens=SEQUENCE, limit=st.integers(0, 10))
    def match(self, salt: str, tokens: list[int], limit: int) -> None:
        found = self.tree.match(salt, pack(tokens), limit)
        prefixes = [tuple(tokens[:n]) for n in range(len(tokens) + 1)]
        known = max((len(p) for p in prefixes if (salt, p) in self.known), default=0)
        best = max((len(p) for p in prefixes if (salt, p) in self.states and len(p) <= limit), default=0)
        assert (found.tokens, found.node.end, key(found.node)[0]) == (known, best, salt)
        usable = min(known, limit)
        was_there = any((salt, p) in self.evicted and best < len(p) <= usable for p in prefixes)
        assert (found.miss_reason == "") == (best == usable)
        assert (found.miss_reason == "evicted") == (was_there and best < usable)

    @rule(at=PICK)
    def evict_state(self, at: int) -> None:
        stateful = [node for node in self.nodes() if node.state is not None]
        if stateful:
            node = stateful[at % len(stateful)]
            self.ledger.free(self.tree.take_state(node))
            node.evicted = True
            self.states.discard(key(node))
            self.evicted.add(key(node))

    @rule(at=PICK)
    def remove_leaf(self, at: int) -> None:
        """Remove a leaf; grants that were pinned to the leaf are pinned to its parent."""
        leaves = [node for node in self.nodes() if not node.children and node.state is None]
        if not leaves:
            return
        leaf = leaves[at % len(leaves)]
        salt, whole = key(leaf)
        parent = leaf.parent
        assert parent is not None
        self.pinned = [parent if node is leaf else node for node in self.pinned]
        self.tree.remove(leaf)
        self.known -= {(salt, whole[:n]) for n in range(parent.end + 1, len(whole) + 1)}
        self.ends.discard((salt, whole))
        self.evicted.discard((salt, whole))

    @precondition(lambda self: self.pinned)
    @rule(at=PICK)
    def unpin(self, at: int) -> None:
        self.tree.unpin(self.pinned.pop(at % len(self.pinned)))

    @rule()
    def flush(self) -> None:
        epoch = self.tree.epoch
        stateful = self.tree.clear()
        assert {key(node) for node in stateful} == self.states and self.tree.epoch == epoch + 1
        for node in stateful:
            assert node.state is not None
            self.ledger.free(node.state)
        self.forget()

    @invariant()
    def the_tree_is_the_model(self) -> None:
        tree = self.tree
        assert {key(node) for node in tree.nodes} == self.ends
        assert {key(node) for node in tree.states} == self.states
        assert {key(node) for node in tree.nodes if node.evicted} == self.evicted
        assert tree.tokens == len(self.known)
        pins = Counter(map(id, self.pinned))
        assert all(node.pins == pins[id(node)] for node in (*tree.nodes, *tree.roots.values()))

    @invariant()
    def every_page_reads_as_its_path(self) -> None:
        size = self.pages.size
        named: Counter[int] = Counter()
        for node in self.tree.nodes:
            named.update(node.pages)
            table, whole = self.tree.page_table(node), key(node)[1]
            assert len(table) == self.pages.cover(node.end)
            for position in range(len(whole)):
                assert self.written[table[position // size]][position % size] == whole[: position + 1]
        assert [named[page] for page in range(len(self.pages))] == self.pages.node_refs
        assert self.pages.used == 0 and self.pages.cached == len(+named)

    def teardown(self) -> None:
        self.ledger.close()


def key(node: Node) -> tuple[str, Path]:
    *_, root = path_to_root(node)
    return root.salt, tuple(unpack(b"".join(step.tokens for step in reversed(list(path_to_root(node))))))


LedgerMachine.TestCase.settings = BOUNDED
PagesMachine.TestCase.settings = BOUNDED
TreeMachine.TestCase.settings = BOUNDED
TestLedger = LedgerMachine.TestCase
TestPages = PagesMachine.TestCase
TestTree = TreeMachine.TestCase
