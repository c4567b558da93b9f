"""The four actors over the hash device, put together as the relay does. Their pools refuse what the scenario says."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from baton.actors.actor import Actor, Address
from baton.actors.cache.account import Account
from baton.actors.cache.actor import MAX_BLOCKED, MAX_OVERTAKING, Cache
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Match, Node, path_to_root
from baton.actors.cache.waiting import Parked, Wait
from baton.actors.forward.actor import Forward
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Want
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.chances import REMEMBERED_BY_ALL, Chance
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
from tests.simulation.toy_drafter import draft_toys
from tests.simulation.toy_grammar import ToyMatcher

if TYPE_CHECKING:
    from tests.simulation.driver import Simulation


class ScribblingPages(PagePool):
    """A page pool that makes the device overwrite each page that is freed."""

    device: HashDevice | None = None

    def _reclaim(self, page: int) -> None:
        super()._reclaim(page)
        if not self.grant_refs[page] and not self.node_refs[page] and self.device is not None:
            self.device.scribble_page(page)


class StingyAllocator(Allocator):
    """An allocator that refuses pages and slots where the scenario says so, and checks which pages can be evicted."""

    refuses: Callable[[], bool]
    no_checkpoints: Callable[[], bool]

    def _can_evict(self, number: int) -> bool:
        """Return the allocator's answer, after comparing it with a scan of the whole tree.

        A page can be evicted if only nodes use it, and none of these nodes is on a path that an open grant pins.
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
    """A cache that refuses what the scenario says, and checks its grants and evictions."""

    no_room = False  # the fault NoRoom is active
    no_checkpoints = False  # the fault NoCheckpoints is active

    def _make_allocator(self) -> Allocator:
        parts = self.ledger, self.pages, self.tree, self.eviction, self.tiers
        allocator = StingyAllocator(*parts, self.counters)
        allocator.refuses = lambda: self.no_room and len(self.accounts) > 1
        allocator.no_checkpoints = lambda: self.no_checkpoints
        return allocator

    def _answer(self, parked: Parked) -> Wait | None:
        return Wait.ALLOCATION if self.no_room else super()._answer(parked)

    def _serve(self) -> None:
        """Serve, and check that no Acquire that fits is left waiting, unless an earlier one may not be overtaken."""
        super()._serve()
        # Skip the check while rows wait for pages, which go first, or while exports still hold slots and pages.
        later = self.no_room or self.page_queue or self.tiers.exporting
        ready = [] if later else self.waiting.in_order()
        ready = [p for p in ready if p.acquire.predecessor not in self.accounts and not self.together.is_waiting(p)]
        for parked in ready[:MAX_BLOCKED]:
            need = self.pages.cover(len(parked.acquire.tokens) // WIDTH + 1) + len(self.accounts)
            room = self.ledger.counts[Place.FREE] and self.pages.free >= need
            is_asking = isinstance(self.tiers, HostAndDisk) and self.tiers.imports.is_asking(parked)
            waits = parked.awaits or is_asking
            assert not room or waits, f"grant {parked.acquire.grant} waits, and there is room for it"
            if parked.overtaken >= MAX_OVERTAKING:
                return

    def _grant(self, parked: Parked, match: Match, below: Node[StateCopy] | None, need: int) -> bool:
        """Grant, and check that pages were evicted only for a grant that succeeds, or while states are exported."""
        before = self.counters["evicted_pages"]
        granted = super()._grant(parked, match, below, need)
        evicted = self.counters["evicted_pages"] - before
        assert granted or not evicted or self.tiers.exporting, f"{evicted} pages were evicted for nothing"
        return granted

    def _give_spares(self, want: Want) -> None:
        """Give checkpoint slots, and check that none was taken from a session's state."""
        named = dict(self.tiers.names.in_pool)
        super()._give_spares(want)
        assert named == self.tiers.names.in_pool, "a session has lost its state for a checkpoint"

    def _flush(self) -> None:
        super()._flush()
        assert not self.tree.states, "a flush leaves states in the tree"
        assert not self.tiers.store.tree.states, "a flush leaves copies below the pool"


class Unit:
    """The four actors of a ring, which are started, fail and are replaced together, and their checks."""

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
            peers=simulation.peers,
            max_tree_tokens=scenario.max_tree_tokens,
            worth_waiting=scenario.worth_waiting,
            worth_asking=scenario.worth_asking,
            kind=StingyCache,
        )
        self.cache.receive(scenario.speeds)
        watch_losses(self.cache.tiers)
        self.cache.no_checkpoints = any(isinstance(fault, NoCheckpoints) for fault in scenario.faults)
        self.scheduler = Scheduler(simulation.sender("scheduler"), scenario.limits)
        self.scheduler.receive(scenario.speeds)
        self.forward = Forward(simulation.sender("forward"), device, scenario.limits.max_running)
        draft = partial(draft_toys, scenario.drafter, scenario.pages > 0, Chance(REMEMBERED_BY_ALL))
        self.results = ResultProcessor(simulation.sender("results"), Letters(), constrained_by(ToyMatcher), draft)
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
        self.generations = [0] * scenario.slots  # how often each slot has been taken
        self.last_grant = 0  # the highest grant id that was used so far
        self.salts: dict[int, str] = {}  # by grant
        self.tree_depth: dict[int, int] = {}  # by grant: deepest position on its path with a state in the tree
        self.retired_at: dict[int, int] = {}  # by grant: position of its final state; 0 if that is poisoned

    @property
    def counters(self) -> Counter[str]:
        return self.cache.counters + self.scheduler.counters + self.results.counters
