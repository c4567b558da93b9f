"""The four actors over the hash device, put together as the relay does, with what a scenario wants refused."""

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
from tests.simulation.checks_of_worth import MarkChecks, watch
from tests.simulation.client import Letters
from tests.simulation.hash_device import HashDevice
from tests.simulation.scenario import NoCheckpoints
from tests.simulation.toy_grammar import ToyMatcher

if TYPE_CHECKING:
    from tests.simulation.driver import Simulation


class ScribblingPages(PagePool):
    """Tells the device of freed pages, so that it may overwrite them."""

    device: HashDevice | None = None

    def _reclaim(self, page: int) -> None:
        super()._reclaim(page)
        if not self.grant_refs[page] and not self.node_refs[page] and self.device is not None:
            self.device.scribble_page(page)


class StingyAllocator(Allocator):
    refuses: Callable[[], bool]
    no_checkpoints: Callable[[], bool]

    def _can_evict(self, wanted: int) -> bool:
        """As many as a look at the whole tree finds: all that only nodes name that no open grant goes on from."""
        kept = {step for node in self._tree.nodes if node.pins for step in path_to_root(node)}
        pages = {page for node in kept for page in node.pages if not self._pages.grant_refs[page]}
        found = super()._can_evict(wanted)
        assert found == (self._pages.cached - len(pages) >= wanted), f"eviction of {wanted} pages: {found}"
        return found

    def checkpoint_slot(self, account: Account, position: int, kind: Kind) -> Lease | None:
        if not self.no_checkpoints():
            return super().checkpoint_slot(account, position, kind)
        self._counters["no checkpoint slot"] += 1
        account.pass_by(position)
        return None

    def take_pages(self, wanted: int) -> list[int] | None:
        return None if self.refuses() else super().take_pages(wanted)


class StingyCache(Cache):
    """Refuses what the scenario wants refused."""

    no_room = False
    no_checkpoints = False

    def _make_allocator(self) -> Allocator:
        parts = self.ledger, self.pages, self.tree, self.eviction, self.tiers
        allocator = StingyAllocator(*parts, self.counters)
        allocator.refuses = lambda: self.no_room and len(self.accounts) > 1
        allocator.no_checkpoints = lambda: self.no_checkpoints
        return allocator

    def _answer(self, parked: Parked) -> Wait | None:
        return Wait.ALLOCATION if self.no_room else super()._answer(parked)

    def _serve(self) -> None:
        """Leaves nobody waiting for whom there is room, unless somebody before it was overtaken often enough."""
        super()._serve()
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
        """Evicts for a grant that follows, or is about to: a copy is under way."""
        before = self.counters["evicted_pages"]
        granted = super()._grant(parked, match, below, need)
        evicted = self.counters["evicted_pages"] - before
        assert granted or not evicted or self.tiers.exporting, f"{evicted} pages were evicted for nothing"
        return granted

    def _give_spares(self, want: Want) -> None:
        """No session's state goes for a checkpoint."""
        named = dict(self.tiers.names.in_pool)
        super()._give_spares(want)
        assert named == self.tiers.names.in_pool, "a session has lost its state for a checkpoint"

    def _flush(self) -> None:
        super()._flush()
        assert not self.tree.states, "a flush leaves states in the tree"
        assert not self.tiers.store.tree.states, "a flush leaves copies below the pool"


class Unit:
    """The four actors of a ring, started, failed and replaced as one.

    generations: of each slot, how often it was taken. last_grant, salts, known and worth: of the grants so far, the
    highest, whose they are, how far the tree knows each, and what the retired state of each is worth.
    """

    def __init__(self, simulation: "Simulation") -> None:
        scenario, device = simulation.scenario, simulation.device
        self.ledger = Ledger(scenario.slots, simulation.moved, simulation.violated)
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
        watch(self.cache.tiers)
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
        self.generations = [0] * scenario.slots
        self.last_grant = 0
        self.salts: dict[int, str] = {}
        self.known: dict[int, int] = {}
        self.worth: dict[int, int] = {}

    @property
    def counters(self) -> Counter[str]:
        return self.cache.counters + self.scheduler.counters + self.results.counters
