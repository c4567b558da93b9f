"""The assembled and supervised ring: four actors around one device, the api's actor, and the ledger."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import anyio
import anyio.to_thread

from baton.actors.actor import Actor, Address, Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.limits import NO_TIERS, TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.cache.worth.order import PER_TOKEN, Costs, Policy
from baton.actors.forward.actor import Forward
from baton.actors.forward.launching import Device
from baton.actors.forward.threads import DeviceThread
from baton.actors.lease import Ledger, Move, Place, Violation
from baton.actors.messages import DiskReport, Message, PeerReport, Ran, Restarted, Speeds, Transferred
from baton.actors.peers.engines import PeerEngines
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.interfaces import Constrain, Draft, Vocabulary, no_drafts, refuse_grammars
from baton.actors.runtime.codec import Codec
from baton.actors.runtime.digests import Digester
from baton.actors.runtime.events import Event, UnitEvent, move_event
from baton.actors.runtime.explain import CachedState, explain_slots, explain_tree, states_without_session
from baton.actors.runtime.mailboxes import Runtime, as_is
from baton.actors.runtime.observing import MeasuringObserver
from baton.actors.runtime.speeds import measured
from baton.actors.runtime.timings import Timings, timed
from baton.actors.runtime.tracing import Traces
from baton.actors.runtime.watching import StateWatch
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.state import Limits
from baton.actors.storage.disk import DiskThread


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The sizes and settings of a ring."""

    slots: int  # slots of the state pool
    pages: int  # pages of the KV pool; 0 without attention
    limits: Limits
    tiers: TierLimits = NO_TIERS
    codec_check: bool = False  # encode and decode every message on its way
    poison_freed: bool = False  # overwrite a slot when it becomes free, so that a later read is noticed
    restarts: int = 3  # most restarts of the unit within `restart_window` seconds
    restart_window: float = 60.0
    cache_policy: Policy = "worth"  # which states are evicted first
    costs: Costs = PER_TOKEN  # costs of computing and copying, by which the "worth" policy ranks states


class DeviceFailed(Exception):
    """The device is lost, or raised an error that could not be contained in a row. The ring cannot continue."""


class Unit:
    """The four actors of a ring, which are replaced together, with their ledger, mailboxes and device thread."""

    def __init__(self, config: RelayConfig, device: Device, vocabulary: Vocabulary, relay: "Relay") -> None:
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[NoReturn] = self._loop.create_future()
        self._on_move = relay.on_move
        moved = self._poison if config.poison_freed else relay.on_move
        self.ledger = Ledger(config.slots, moved, relay.on_violation, self._loop.time)
        self.traces = Traces(self.trace_of_queued)
        observer = MeasuringObserver(self.traces, relay.timings, relay.clock, relay.numbers, relay.on_event)
        carry = Codec(self.ledger).round_trip if config.codec_check else as_is
        self.runtime = Runtime(self.ledger, carry, observer)
        device.drop_all()  # delete the copies of an earlier unit, before the disk's thread loads new ones
        self.device = DeviceThread(device, self.deliver, self._fail)
        limits, sender = config.limits, self.runtime.sender
        pages = PagePool(config.pages, max(limits.page_size, 1))
        self._disk = relay.disk
        if self._disk is not None:
            self._disk.start(self._from_disk)
        self._peers = relay.peers
        if self._peers is not None:
            self._peers.start(self._from_peers)
        self.cache = relay.make_cache(sender("cache"), self.ledger, pages)
        self.scheduler = Scheduler(sender("scheduler"), limits)
        self.forward = Forward(sender("forward"), self.device, limits.max_running)
        self.results = ResultProcessor(sender("results"), vocabulary, relay.constrain, relay.draft)
        self.actors: dict[Address, Actor] = {
            "cache": self.cache,
            "scheduler": self.scheduler,
            "forward": self.forward,
            "results": self.results,
        }
        for address, actor in self.actors.items():
            self.runtime.add(address, actor)

    async def run(self) -> None:
        """Run the actors until cancelled. Raises an exception group with an actor's exception or DeviceFailed."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            await self.runtime.run()

    async def close(self) -> None:
        """Finish what is enqueued on the device and the disk, and end their threads."""
        self.ledger.close()  # live leases may be garbage-collected from now on
        self._broken.cancel()
        if self._peers is not None:
            self._peers.close()
        await anyio.to_thread.run_sync(self.device.close)
        if self._disk is not None:
            await anyio.to_thread.run_sync(self._disk.close)

    def deliver(self, message: Ran | Transferred | Speeds) -> None:
        """Post a message from one of the device's threads to the actors that it is for."""
        to: tuple[Address, ...] = ("cache", "scheduler") if isinstance(message, Speeds) else ("forward",)
        for address in to:
            self._loop.call_soon_threadsafe(self._arrived, "device", address, message)

    def _from_disk(self, message: DiskReport) -> None:
        self._loop.call_soon_threadsafe(self._arrived, "disk", "cache", message)

    def _from_peers(self, message: PeerReport) -> None:
        """Post a message from the peers, which are called on the event loop."""
        self._arrived("peers", "cache", message)

    def _arrived(self, sender: str, to: Address, message: Message) -> None:
        """Send a message from another thread. On an error, fail the unit: nothing else would notice the loss."""
        try:
            self.runtime.send(sender, to, message)
        except Exception as error:
            self._break(error)

    def trace_of_queued(self, grant: int) -> str:
        record = self.scheduler.state.acquiring.get(grant)
        return record.request.trace if record is not None else ""

    def _poison(self, move: Move) -> None:
        """Overwrite a slot that has become free.

        On the stream this comes after every use by its last holder, and before any use by the next.
        """
        if move.place is Place.FREE:
            self.device.poison(move.slot)
        if self._on_move is not None:
            self._on_move(move)

    async def _watch(self) -> NoReturn:
        await self._broken

    def _break(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _fail(self, cause: BaseException) -> None:
        failed = DeviceFailed("the device failed")
        failed.__cause__ = cause
        self._loop.call_soon_threadsafe(self._break, failed)


class Relay:
    """The ring under supervision: one device, the four actors around it (a Unit), and the api's actor.

    Create it inside the event loop that runs it. When an actor raises, `run` makes a new unit over the same device.

    api: makes the api's actor, given its Send; that actor outlives the unit.
    on_move: called with each change of a slot's place.
    on_violation: called whenever a slot is quarantined.
    on_restart: called with the exception that broke the old unit.
    on_event: called with every Event, from the event loop and from the device's thread; must return at once.
    clock: seconds, for events and timings.
    disk: the disk's thread; None if states are not written to files.
    peers: the links to other engines; None if there are none.
    constrain: makes the constraints of requests with grammars, as in ResultProcessor.
    draft: makes the drafters of requests, as in ResultProcessor.
    cache: makes the cache of a unit; None: one with the eviction policy and the tiers that the configuration names.
    """

    def __init__(
        self,
        config: RelayConfig,
        device: Device,
        vocabulary: Vocabulary,
        api: Callable[[Send], Actor],
        on_move: Callable[[Move], None] | None = None,
        on_violation: Callable[[Violation], None] | None = None,
        on_restart: Callable[[Exception], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskThread | None = None,
        peers: PeerEngines | None = None,
        constrain: Constrain = refuse_grammars,
        draft: Draft = no_drafts,
        cache: Callable[[Send, Ledger, PagePool], Cache] | None = None,
    ) -> None:
        self.on_violation, self._on_restart = on_violation, on_restart
        self.on_move = on_move if on_event is None else _recording(on_event, clock, on_move)
        self.on_event, self.clock, self.timings, self.numbers = on_event, clock, Timings(), count(1)
        self._config, self._vocabulary, self.disk, self.constrain = config, vocabulary, disk, constrain
        self.peers, self.draft = peers, draft
        page_size, self._speeds = max(config.limits.page_size, 1), Speeds(0.0, 0.0)
        timed_device = measured(device, config.costs, page_size, self._measured)
        self._device = timed(timed_device, self.timings, clock, on_event)
        self._digester = Digester()
        self._watch: StateWatch | None = None
        self._restarted: deque[float] = deque(maxlen=config.restarts + 1)
        self._before: Counter[str] = Counter()
        self._moves_before: Counter[str] = Counter()
        self._api = api(self._send_from_api)
        self.make_cache = cache or self._make_cache
        self.unit = self._make_unit()

    async def run(self) -> None:
        """Run until cancelled. When an actor raises, restart the unit, as often as the configuration allows."""
        try:
            while True:
                try:
                    self._tell_api()
                    await self.unit.run()
                except Exception as broken:
                    raise_if_cancelled()  # A task group that raises has suppressed a cancellation of its task.
                    if is_device_lost(broken) or not self._may_restart():
                        raise
                    await self._restart(broken)
        finally:
            with anyio.CancelScope(shield=True):
                await self.unit.close()

    @property
    def ledger(self) -> Ledger:
        return self.unit.ledger

    @property
    def trace(self) -> str:
        """The trace of the message that is being received; "" if there is none."""
        return self.unit.traces.current

    def audit(self) -> list[Violation]:
        """Compare every lease that an actor holds with the ledger, and return the differences."""
        return self.ledger.audit({address: actor.leases() for address, actor in self.unit.actors.items()})

    def counters(self) -> dict[str, int]:
        return dict(self._before + self._counted())

    def lease_moves(self) -> Counter[str]:
        return self._moves_before + self.ledger.moves

    def gauges(self) -> dict[str, float | Mapping[str, float]]:
        """Return the current numbers for metrics.

        states: how many states are in slots, by kind.
        state_chance: the probability that a new state is ever resumed from, by kind.
        """
        unit = self.unit
        pages = unit.cache.pages
        return {
            "running": len(unit.scheduler.state.rows),
            "waiting": len(unit.scheduler.state.queue),
            "slots": self.slots_by_use(),
            "states": Counter(node.kind.label for node in unit.cache.tree.states),
            "state_chance": unit.cache.eviction.chances(),
            "pages": {"free": pages.free, "used": pages.used, "cached": pages.cached},
            "stored": unit.cache.tiers.figures(),
            "mailbox_depth": {address: len(box.envelopes) for address, box in unit.runtime.mailboxes.items()},
        }

    def token_seconds(self) -> float:
        """Return the seconds that one prompt token takes; 0 if that was not measured yet."""
        return self._config.costs.saved(0, 1) * self._speeds.operation

    def step_seconds(self) -> float:
        """Return the seconds of a step without prompts; 0 if that was not measured yet."""
        return self._speeds.decode

    def slots_by_use(self) -> dict[str, int]:
        return {str(place): self.ledger.counts[place] for place in Place}

    def running_rows(self) -> int:
        return len(self.unit.scheduler.state.rows)

    def ended_rows(self) -> int:
        """Return how many requests have given back their row since the actors started."""
        return self.unit.scheduler.state.ended

    def trace_of(self, grant: int) -> str:
        """Return the trace id of a request whose Acquire is not answered yet."""
        return self.unit.trace_of_queued(grant)

    def debug_peers(self) -> list[dict[str, object]]:
        """Return what is known of each link to a peer."""
        return list(self.peers.figures()) if self.peers is not None else []

    def debug_slots(self) -> list[dict[str, object]]:
        """Return each slot's place, holder, generation and loans, and its use, where known."""
        unit = self.unit
        now = asyncio.get_running_loop().time()
        return explain_slots(unit.ledger, unit.scheduler, unit.forward, unit.cache.tree, now)

    def debug_tree(self) -> list[dict[str, object]]:
        """Return the nodes of the radix tree, without their tokens."""
        return explain_tree(self.unit.cache.tree, self.unit.cache.eviction.worth)

    def states_without_session(self) -> list[CachedState]:
        """Return the states in the pool and in host memory that no session has, those of most worth first."""
        cache, tiers = self.unit.cache, self.unit.cache.tiers
        return states_without_session(cache, tiers) if isinstance(tiers, HostAndDisk) else []

    def watch_states(self) -> StateWatch:
        """Return the watch of the cached states. After a restart of the unit it is another one, of other states."""
        cache, tiers = self.unit.cache, self.unit.cache.tiers
        if self._watch is None or self._watch.cache is not cache:
            copies = tiers.store.tree if isinstance(tiers, HostAndDisk) else None
            self._watch = StateWatch(cache, copies, self._digester)
        return self._watch

    def unwatch_states(self) -> None:
        """Stop to collect changes of the cached states."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _make_cache(self, send: Send, ledger: Ledger, pages: PagePool) -> Cache:
        config = self._config
        return make_cache(send, ledger, pages, config.cache_policy, config.costs, config.tiers, self.disk, self.peers)

    def _make_unit(self) -> Unit:
        if self.on_event is not None:
            self.on_event(UnitEvent(self.clock(), self._config.slots))
        unit = Unit(self._config, self._device, self._vocabulary, self)
        unit.runtime.add("api", self._api)
        unit.deliver(self._speeds)
        return unit

    def _may_restart(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._restarted.append(now)
        return len(self._restarted) <= self._config.restarts or now - self._restarted[0] > self._config.restart_window

    async def _restart(self, broken: Exception) -> None:
        """Replace the unit over the same device.

        Messages that the old unit has sent to the api are delivered before Restarted, so no output is lost.
        """
        old = self.unit
        await old.close()
        if self.disk is not None:
            await anyio.to_thread.run_sync(self.disk.scan_again)
        if self._on_restart is not None:
            self._on_restart(broken)
        self._before += self._counted() + Counter(restarts=1)
        self._moves_before += old.ledger.moves
        self.unit = self._make_unit()
        mailbox = self.unit.runtime.mailboxes["api"]
        for envelope in old.runtime.mailboxes["api"].envelopes:
            mailbox.put(envelope)
        self.unit.runtime.send("supervision", "api", Restarted())

    def _tell_api(self) -> None:
        """Deliver the api's messages, Restarted among them, before the new unit runs.

        So the api resubmits its requests before any other message is delivered, and submits none twice.
        """
        if self.unit.runtime.mailboxes["api"].envelopes:
            while self.unit.runtime.mailboxes["api"].envelopes:
                self.unit.runtime.deliver("api")
            self._api.act()

    def _counted(self) -> Counter[str]:
        unit = self.unit
        own = Counter(lease_violations=self.ledger.violations, messages=unit.runtime.delivered)
        return unit.cache.counters + unit.cache.tiers.counters + unit.scheduler.counters + unit.results.counters + own

    def _measured(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self.unit.deliver(speeds)

    def _send_from_api(self, to: Address, message: Message) -> None:
        self.unit.runtime.send("api", to, message)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was asked to cancel and goes on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def is_device_lost(broken: BaseException) -> bool:
    """Return whether this exception is DeviceFailed, or an exception group that contains one."""
    if isinstance(broken, BaseExceptionGroup):
        return broken.subgroup(DeviceFailed) is not None
    return isinstance(broken, DeviceFailed)


def _recording(
    on_event: Callable[[Event], None], clock: Callable[[], float], on_move: Callable[[Move], None] | None
) -> Callable[[Move], None]:
    def moved(move: Move) -> None:
        on_event(move_event(move, clock()))
        if on_move is not None:
            on_move(move)

    return moved
