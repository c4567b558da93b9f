"""The four actors over the hash device, put together as the relay does, with pools that refuse what a scenario says."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.actors.actor import Actor, Address
from baton.actors.cache.account import Account
from baton.actors.cache.actor import MAX_BLOCKED, MAX_OVERTAKING, Cache
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Match, Node, path_to_root
from baton.actors.cache.waiting import Parked, Wait
from baton.actors.forward.actor import Forward
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Want
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.constraint import constrained_by
from baton.actors.runtime.codec import Codec
from baton.actors.scheduler.actor import Scheduler
from baton.actors.tokens import WIDTH
from tests.simulation.checks import CacheChecks
from tests.simulation.checks_of_hints import HintChecks
from tests.simulation.checks_of_sessions import SessionChecks
from tests.simulation.checks_of_worth import MarkChecks, watch_losses
from tests.simulation.client import Letters
from tests.simulation.hash_device import HashDevice
from tests.simulation.scenario import NoCheckpoints
from tests.simulation.toy_grammar import ToyMatcher

if TYPE_CHECKING:
    from tests.simulation.driver import Simulation


class ScribblingPages(PagePool):
    """A page pool that has the device overwrite the pages that are freed."""

    device: HashDevice | None = None

    def _reclaim(self, page: int) -> None:
        super()._reclaim(page)
        if not self.grant_refs[page] and not self.node_refs[page] and self.device is not None:
            self.device.scribble_page(page)


class StingyAllocator(Allocator):
    """An allocator that refuses what the scenario says, and checks the count of evictable pages."""

    refuses: Callable[[], bool]
    no_checkpoints: Callable[[], bool]

    def _can_evict(self, number: int) -> bool:
        """Ask the allocator, and compare its answer with a scan of the whole tree.

        The pages that can be evicted are those that only nodes name, except for nodes on paths that open grants pin.
        """
        pinned = {step for node in self._tree.nodes if node.pins for step in path_to_root(node)}
        pages = {page for node in pinned for page in node.pages if not self._pages.grant_refs[page]}
        found = super()._can_evict(number)
        assert found == (self._pages.cached - len(pages) >= number), f"eviction of {number} pages: {found}"
        return found

    def checkpoint_slot(self, account: Account, position: int, kind: Kind) -> Lease | None:
        if not self.no_checkpoints():
            return super().checkpoint_slot(account, position, kind)
        self._counters["no checkpoint slot"] += 1
        account.pass_by(position)
        return None

    def take_pages(self, number: int) -> list[int] | None:
        return None if self.refuses() else super().take_pages(number)


class StingyCache(Cache):
    """A cache that refuses what the scenario says, and checks what it grants and evicts."""

    no_room = False  # see the fault NoRoom
    no_checkpoints = False  # see the fault NoCheckpoints

    def _make_allocator(self) -> Allocator:
        parts = self.ledger, self.pages, self.tree, self.eviction, self.tiers
        allocator = StingyAllocator(*parts, self.counters)
        allocator.refuses = lambda: self.no_room and len(self.accounts) > 1
        allocator.no_checkpoints = lambda: self.no_checkpoints
        return allocator

    def _answer(self, parked: Parked) -> Wait | None:
        return Wait.ALLOCATION if self.no_room else super()._answer(parked)

    def _serve(self) -> None:
        """Serve, and check that no waiting Acquire fits, except after one that was overtaken as often as is allowed."""
        super()._serve()
        # Rows that wait for a page go first, and exports give their slots and pages back later.
        later = self.no_room or self.page_queue or self.tiers.exporting
        ready = [] if later else self.waiting.in_order()
        ready = [p for p in ready if p.acquire.predecessor not in self.accounts and not self.together.is_waiting(p)]
        for parked in ready[:MAX_BLOCKED]:
            need = self.pages.cover(len(parked.acquire.tokens) // WIDTH + 1) + len(self.accounts)
            room = self.ledger.counts[Place.FREE] and self.pages.free >= need
            assert not room or parked.awaits, f"grant {parked.acquire.grant} waits, and there is room for it"
            if parked.overtaken >= MAX_OVERTAKING:
                return

    def _grant(self, parked: Parked, match: Match, below: Node[StateCopy] | None, need: int) -> bool:
        """Grant, and check that pages were evicted only for a grant that follows, or together with an export."""
        before = self.counters["evicted_pages"]
        granted = super()._grant(parked, match, below, need)
        evicted = self.counters["evicted_pages"] - before
        assert granted or not evicted or self.tiers.exporting, f"{evicted} pages were evicted for nothing"
        return granted

    def _give_spares(self, want: Want) -> None:
        """Give checkpoint slots, and check that no session's state was evicted for one."""
        named = dict(self.tiers.names.in_pool)
        super()._give_spares(want)
        assert named == self.tiers.names.in_pool, "a session has lost its state for a checkpoint"

    def _flush(self) -> None:
        super()._flush()
        assert not self.tree.states, "a flush leaves states in the tree"
        assert not self.tiers.store.tree.states, "a flush leaves copies below the pool"


class Unit:
    """The four actors of a ring, started, failed and replaced as one, and their checks."""

    def __init__(self, simulation: "Simulation") -> None:
        scenario, device = simulation.scenario, simulation.device
        self.ledger = Ledger(scenario.slots, simulation.on_move, simulation.on_violation)
        self.codec = Codec(self.ledger) if scenario.codec else None
        pages = ScribblingPages(scenario.pages, device.page_size)
        pages.device = device
        self.cache = make_cache(
            simulation.sender("cache"),
            self.ledger,
            pages,
            scenario.policy,
            limits=scenario.tiers,
            disk=simulation.disk,
            max_tree_tokens=scenario.max_tree_tokens,
            worth_waiting=scenario.worth_waiting,
            kind=StingyCache,
        )
        self.cache.receive(scenario.speeds)
        watch_losses(self.cache.tiers)
        self.cache.no_checkpoints = any(isinstance(fault, NoCheckpoints) for fault in scenario.faults)
        self.scheduler = Scheduler(simulation.sender("scheduler"), scenario.limits)
        self.scheduler.receive(scenario.speeds)
        self.forward = Forward(simulation.sender("forward"), device, scenario.limits.max_running)
        self.results = ResultProcessor(simulation.sender("results"), Letters(), constrained_by(ToyMatcher))
        self.actors: dict[Address, Actor] = {
            "cache": self.cache,
            "scheduler": self.scheduler,
            "forward": self.forward,
            "results": self.results,
        }
        self.checks = CacheChecks(simulation, self.cache)
        self.session_checks = SessionChecks(simulation, self.cache)
        self.mark_checks = MarkChecks(self)
        self.hint_checks = HintChecks(self)
        self.generations = [0] * scenario.slots  # how often each slot was taken
        self.last_grant = 0  # the highest grant id so far
        self.salts: dict[int, str] = {}  # by grant
        self.tree_depth: dict[int, int] = {}  # the deepest position of each grant's path that has a state in the tree
        self.retired_at: dict[int, int] = {}  # the position of each grant's final state; 0 if it is poisoned

    @property
    def counters(self) -> Counter[str]:
        return self.cache.counters + self.scheduler.counters + self.results.counters
