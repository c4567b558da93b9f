"""The driver of the simulation. From a seed it draws the order of deliveries, which actor acts, delays and faults.

Messages keep their order only between the same sender and receiver. Time is virtual: a turn of an actor takes 1, and
calls of the device and of clients take what the scenario says.
"""

import random
from collections import Counter, deque
from heapq import heappop, heappush
from typing import Any

from baton.actors.actor import Address, Send
from baton.actors.cache.radix import path_to_root
from baton.actors.lease import Lease, LeaseError, Move, Place, Violation
from baton.actors.messages import (
    Abort,
    Acquire,
    Admitted,
    DiskReport,
    Donate,
    Flush,
    Free,
    Granted,
    Kept,
    Mark,
    Message,
    Passed,
    Paused,
    PeerReport,
    Ran,
    Requeue,
    Restarted,
    Retired,
    SaveFromReq,
    Spare,
    Step,
    Stepped,
    Suspended,
    Transferred,
)
from baton.actors.runtime.transport import arrive, depart, leases_in
from baton.actors.storage.peers import NoPeers, Peers
from tests.simulation.checks import check_end, check_leases, check_paused, check_rows, check_shares, check_turns
from tests.simulation.client import Client
from tests.simulation.disk import SimulatedDisk
from tests.simulation.hash_device import HashDevice, Row
from tests.simulation.scenario import (
    BadCall,
    BadStep,
    BadWrite,
    Crash,
    DamagedFile,
    DrainAt,
    FlushAt,
    NoRoom,
    PausedFrom,
    Poison,
    RefusedSends,
    Scenario,
    draw,
)
from tests.simulation.toy_predictor import ToyPredictor
from tests.simulation.trace import line
from tests.simulation.unit import Unit

MAX_TURNS = 50_000


class InjectedCrash(Exception):
    """An error that an actor raises because the scenario says so."""


class Simulation:
    """Everything that one seed runs: the actors, the client, the device, the disk, and the messages in flight."""

    def __init__(self, scenario: Scenario | int, tracing: bool = False) -> None:
        self.scenario = scenario = draw(scenario) if isinstance(scenario, int) else scenario
        self.rng = random.Random(scenario.schedule)
        self.now = 0.0
        self.most_turns = MAX_TURNS  # a run that takes more turns fails
        self.delivered = 0  # number of messages delivered so far
        self.counters: Counter[str] = Counter()
        self.trace: list[str] = []  # one line for each delivery, if `tracing`
        self._tracing = tracing
        self._queues: dict[tuple[str, str], deque[Message]] = {}  # messages in flight, by sender and receiver
        # The possible next turns: (sender, receiver) of each queue with a message, and ("act", actor).
        self._ready: list[tuple[str, str]] = []
        self._timers: list[tuple[float, int, Any]] = []  # a heap of (time, number, value to fire)
        self._timer_ids = 0
        self._turns: Counter[str] = Counter()  # deliveries to each actor, for Crash
        self._sends: Counter[str] = Counter()  # messages that each actor has sent, for Crash
        self._lease_sends = 0  # messages with leases so far, for RefusedSends
        self._dirty = False  # whether the current delivery may have changed a lease
        self._violations: list[Violation] = []
        self._read_faults()
        page_size = max(scenario.limits.page_size, 1)
        fault = self._device_fault if self._bad_steps or self._poison else (lambda run, moved: "")
        copies = self._copy_duration if scenario.copy_time is not None else None
        self.device = HashDevice(
            scenario.slots, scenario.pages, page_size, self._from_device, self._duration, fault, copies
        )
        self.device.predict = ToyPredictor(scenario.schedule, scenario.predictor, scenario.pages > 0).predict
        self.device.calls.bad_calls = {(bad.how, bad.at) for bad in scenario.faults if isinstance(bad, BadCall)}
        self.disk = SimulatedDisk(
            self.device, scenario.tiers.file_bytes, self._from_disk, self._disk_duration, scenario.file_byte
        )
        self._engines = [engine for engine in (self.device, self.device.copies, self.disk) if engine is not None]
        self.disk.bad_writes = self._files_of(BadWrite)
        self.disk.damaged_files = self._files_of(DamagedFile)
        self.peers: Peers = NoPeers()
        self.waits_outside = False  # whether something outside of this simulation may still move
        self.client = Client(scenario, self.sender("api"), lambda after, what: self._at(self.now + after, what))
        self.unit = Unit(self)

    @property
    def can_move(self) -> bool:
        """Whether a turn would do something other than the next step of the shutdown."""
        return bool(self._ready or self._timers or any(engine.due is not None for engine in self._engines))

    def turn(self) -> bool:
        """Take a turn; return False when nothing is left to do, the shutdown included."""
        return self._turn()

    def run(self) -> None:
        """Run until every request is answered and the ring is drained.

        Raises AssertionError if a check fails, or the error of an actor.
        """
        try:
            for _ in range(self.most_turns):
                if not self._turn():
                    break
            else:
                raise AssertionError(f"no end after {self.most_turns} turns, {self.client.open} are open")
            check_end(self)
        finally:
            self.finish()

    def finish(self) -> None:
        """Close the ledger, and add up the counters."""
        self.unit.ledger.close()
        self.counters += self.unit.counters + self.client.counters
        self.counters += self.client.sessions.counters + self.disk.counters + self.device.calls.struck

    # Time

    def _turn(self) -> bool:
        """Take a turn: deliver a message, let an actor act, or carry out a call of the device or of the disk.

        Return False when nothing is left to do.
        """
        while self._timers and self._timers[0][0] <= self.now:
            self._fire(heappop(self._timers)[2])
        for engine in self._engines:
            engine.now = self.now
        ready = self._ready
        engines = [engine for engine in self._engines if engine.due is not None and engine.due <= self.now]
        number = len(ready) + len(engines)
        if not number:
            return self._wait()
        self.now += 1
        choice = int(self.rng.random() * number)
        if choice < len(ready) and ready[choice][1] == self.scenario.lazy and self.rng.random() < 0.9:
            choice = int(self.rng.random() * number)  # Choose again, so that the lazy actor rarely gets a turn.
        if choice >= len(ready):
            engines[choice - len(ready)].execute()
            return True
        try:
            self._carry(choice)
        except InjectedCrash as crash:
            self._restart(str(crash))
        return True

    def _wait(self) -> bool:
        """Advance time to the next event. Without one, take the next step of the shutdown.

        Return False when the shutdown is complete.
        """
        times = [engine.due for engine in self._engines if engine.due is not None]
        assert times or not self.client.pausing, f"nothing moves, and the pauses {self.client.pausing} are not answered"
        times += [self._timers[0][0]] if self._timers else []
        self.unit.session_checks.check_quiet(moving=bool(times) or self.waits_outside)
        if times:
            self.now = max(self.now, min(times))
        if times or self.waits_outside:
            return True
        assert not self.client.open, f"nothing moves, and {self.client.open} are open"
        return self.client.wind_down()

    def _at(self, time: float, what: Any) -> None:
        self._timer_ids += 1
        heappush(self._timers, (time, self._timer_ids, what))

    def _fire(self, what: Any) -> None:
        match what:
            case FlushAt():
                self._send("api", "cache", Flush(1))
            case DrainAt():
                self.counters["shutdown in flight"] += bool(self.client.open)
                self.client.drain()
            case PausedFrom(_, until, modes):
                for mode in modes:
                    self.client.pause(mode)
                self._at(until, "continue")
            case "continue":
                self.client.resume()
            case bool():  # NoRoom begins (True) or ends (False).
                self.counters["no room"] += what
                self.unit.cache.no_room = what
                self._ready_to("act", "cache")
            case _:
                self.client.fire(what)
                self.client.act()

    # Messages

    def sender(self, name: str) -> Send:
        return lambda to, message: self._send(name, to, message)

    def _send(self, sender: str, to: Address, message: Message) -> None:
        """Check a message, move its leases, and enqueue it for its receiver."""
        self._dirty = True
        if self._crashes:
            self._sends[sender] += 1
            self._crash(sender, "send", self._sends[sender])
        ledger = self.unit.ledger
        if self._refuse_every:
            self._refuse(sender, to, message)
        self._check_send(message)
        depart(message, sender, to, ledger)
        if self.unit.codec is not None:
            message = self.unit.codec.round_trip(message)
        queue = self._queues.get((sender, to))
        if queue is None:
            queue = self._queues[sender, to] = deque()
        if not queue:
            self._ready_to(sender, to)
        queue.append(message)

    def _ready_to(self, what: str, address: Address) -> None:
        """Add a possible turn: a queue has its first message, or an actor is to act (added at most once)."""
        if what != "act" or ("act", address) not in self._ready:
            self._ready.append((what, address))

    def _carry(self, choice: int) -> None:
        """Deliver the oldest message of a queue or let an actor act. Then check what the turn may have changed."""
        ready = self._ready
        sender, to = pair = ready[choice]
        actor = self.client if to == "api" else self.unit.actors[to]
        self._dirty = False
        if sender == "act":
            ready[choice] = ready[-1]
            ready.pop()
            actor.act()
            if to == "scheduler":
                check_turns(self.unit.scheduler.state)
        else:
            queue = self._queues[pair]
            message = queue.popleft()
            if not queue:
                ready[choice] = ready[-1]
                ready.pop()
            if self._tracing:
                self.trace.append(line(self.now, sender, to, message))
            self._deliver(actor, to, message)
        assert not self._violations, self._violations
        if self._dirty:
            check_leases(self.unit)
            if to == "scheduler":
                check_rows(self.unit.scheduler.state)
                self.unit.mark_checks.check_scheduler()
            if to == "cache":
                self.unit.mark_checks.check_cache()
                self.unit.checks.check()
                self.unit.session_checks.check()

    def _deliver(self, actor: Any, to: Address, message: Message) -> None:
        """Deliver a message, and for some kinds of messages check what must hold right after it."""
        self._dirty = True
        self.delivered += 1
        arrive(message, to, self.unit.ledger)
        if self._crashes and to != "api":
            self._turns[to] += 1
            self._crash(to, "before", self._turns[to])
        if isinstance(message, Mark | Passed):
            self.unit.mark_checks.on_delivery(message)
        if isinstance(message, SaveFromReq | Donate):
            account = self.unit.cache.accounts[message.grant]
            actor.receive(message)
            self.unit.hint_checks.check_checkpoints(account)
            if isinstance(message, SaveFromReq):
                self.unit.session_checks.check_save(message, account.epoch)
        elif isinstance(message, Abort):
            again = message.request in self.unit.scheduler._same_id_waiting
            actor.receive(message)
            rows = {row.record.request.id for row in self.unit.scheduler.state.rows.values()}
            assert again or message.request not in rows, f"{message.request} was given up and runs on"
        else:
            actor.receive(message)
        if self._crashes and to != "api":
            self._crash(to, "after", self._turns[to])
        if to != "api":
            self._ready_to("act", to)
        else:
            actor.act()

    def _from_disk(self, answer: DiskReport) -> None:
        self._send("disk", "cache", answer)

    def _from_device(self, report: Ran | Transferred) -> None:
        self._send("device", "forward", report)

    def _check_send(self, message: Message) -> None:
        """Check a message alone, for faults that the other checks would notice later or never."""
        unit = self.unit
        unit.hint_checks.on_send(message)
        match message:
            case Stepped(step):
                assert step <= self.device.passed, f"step {step} is reported before its event"
            case Step():
                check_shares(unit.scheduler.state, message)
                unit.mark_checks.on_send(message)
            case Passed() | Spare():
                unit.mark_checks.on_send(message)
            case Acquire(grant, _, _, salt):
                assert grant > unit.last_grant, f"grant {grant} is used again"
                unit.last_grant = grant
                unit.salts[grant] = salt
            case Granted(grant, hit=hit, moved=moved, page_copy=copy):
                self.counters[f"goes on from {hit.origin}"] += 1
                self.counters["moved states"] += moved
                self.counters["page copies"] += copy is not None
                *_, root = path_to_root(unit.cache.accounts[grant].node)
                assert root.salt == unit.salts[grant], f"grant {grant} resumes from another tenant's path"
            case Requeue(_, suspect_until):
                self.counters["replayed" if suspect_until else "retracted"] += 1
            case Admitted(grant, _, hit):
                # A moved state is no longer in the tree.
                unit.tree_depth[grant] = hit.cached_tokens - (hit.origin == "slot")
            case Donate(grant, _, position):
                assert position > unit.tree_depth[grant], (
                    f"grant {grant} donates a state at {position} that the tree has"
                )
                unit.tree_depth[grant] = position
            case Kept() | Suspended():
                unit.session_checks.check_report(message)
            case Paused(ticket):
                check_paused(unit, self.client.pausing.get(ticket))
            case Retired(grant, _, _, position, poisoned):
                unit.retired_at[grant] = 0 if poisoned else position
            case Free(_, closes) if closes is not None and closes in unit.tree_depth:
                position, known = unit.retired_at.get(closes, 0), unit.tree_depth[closes]
                is_needed = position > known and not unit.hint_checks.is_given_up(closes)
                assert not is_needed, f"the state of grant {closes} at {position} is freed, and the tree knows {known}"

    def on_move(self, move: Move) -> None:
        """Update the device when a slot changes its place: overwrite a freed slot, protect a slot of the tree."""
        self._dirty = True
        if move.place is Place.FREE:
            self.device.guarded_slots.discard(move.slot)
            self.device.scribble_slot(move.slot)
        elif move.place is Place.CACHED:
            self.device.guarded_slots.add(move.slot)
        elif move.how == "take":
            self.unit.generations[move.slot] += 1
            assert move.generation == self.unit.generations[move.slot], f"{move} repeats a generation"
        elif move.how == "uncache":
            self.device.guarded_slots.discard(move.slot)

    def on_violation(self, violation: Violation) -> None:
        """Record a violation. `_carry` raises it later, because this may run during garbage collection."""
        self._violations.append(violation)

    # Faults

    def _read_faults(self) -> None:
        """Sort the faults by kind, and set timers for faults and requests that have a time."""
        faults = self.scenario.faults
        self._crashes = {(fault.actor, fault.where, fault.at) for fault in faults if isinstance(fault, Crash)}
        self._bad_steps = {fault.run for fault in faults if isinstance(fault, BadStep)}
        self._poison = {(fault.request, fault.position) for fault in faults if isinstance(fault, Poison)}
        self._refuse_every = next((fault.every for fault in faults if isinstance(fault, RefusedSends)), 0)
        for each in (*self.scenario.asks, *self.scenario.talks):
            self._at(each.at, each)
        for fault in faults:
            match fault:
                case FlushAt(at) | DrainAt(at) | PausedFrom(at):
                    self._at(at, fault)
                case NoRoom(at, until):
                    self._at(at, True)
                    self._at(until, False)

    def _files_of(self, kind: type[BadWrite] | type[DamagedFile]) -> set[int]:
        """Return the numbers of the files that the scenario's faults of this kind hit."""
        faults = [fault for fault in self.scenario.faults if isinstance(fault, kind)]
        return {at for fault in faults for at in range(fault.at, fault.at + fault.more + 1)}

    def _crash(self, actor: str, where: str, at: int) -> None:
        if (actor, where, at) in self._crashes:
            self.counters[f"crash {actor}"] += 1
            raise InjectedCrash(actor)

    def from_peers(self, report: PeerReport) -> None:
        """Send a report of the peers to the cache."""
        self._send("peers", "cache", report)

    def restart(self, cause: str) -> None:
        """Replace the four actors, for this cause."""
        self._restart(cause)

    def _restart(self, actor: str) -> None:
        """Replace the four actors as the relay does.

        The streams are drained. The api receives what the old unit had sent to it, and then `Restarted`.
        """
        self.unit.ledger.close()
        no_room = self.unit.cache.no_room
        self.counters += self.unit.counters
        crashes, self._crashes = self._crashes, set()  # nothing crashes during the restart itself
        self._restart_disk()
        self.device.reset()
        late = [message for (_, to), queue in self._queues.items() if to == "api" for message in queue]
        self._queues.clear()
        self._ready.clear()
        self.unit = Unit(self)
        self.unit.cache.no_room = no_room
        if self._tracing:
            self.trace.append(f"{self.now:7.0f}  {actor} crashes, the four actors are replaced")
        for message in (*late, Restarted()):
            self.client.receive(message)
        self.client.act()
        self._crashes = crashes

    def _restart_disk(self) -> None:
        """Drain the device, carry out a random number of the disk's calls, and lose the others."""
        self.device.drain()
        if self.disk.calls:
            self.disk.reset(int(self.rng.random() * (len(self.disk.calls) + 1)))

    def _device_fault(self, run: int, moved: list[tuple[Row, int, int]]) -> str:
        """Return the error that step `run` of the device raises, or ""."""
        if run in self._bad_steps:
            self.counters["bad step"] += 1
            return "injected once"
        for request, position in self._poison:
            if any(row.request.id == request and start <= position < stop for row, start, stop in moved):
                self.counters["poisoned step"] += 1
                return "injected each time"
        return ""

    def _refuse(self, sender: str, to: Address, message: Message) -> None:
        """Before each n-th message with leases, try to send its leases together with a dead one: none may move."""
        leases = list(leases_in(message))
        if not leases:
            return
        self._lease_sends += 1
        if self._lease_sends % self._refuse_every:
            return
        self.counters["refused send"] += 1
        dead = Lease(leases[0].slot, leases[0].generation, self.unit.ledger)
        dead.surrender("used up")
        try:
            depart(Free([*leases, dead]), sender, to, self.unit.ledger)
        except LeaseError:
            return
        raise AssertionError("a dead lease was sent")

    def _duration(self, step: bool) -> float:
        """Draw the duration of a call: on average step_time for a step, and a tenth of it for other calls."""
        mean = self.scenario.step_time
        return 2 * mean * self.rng.random() * (1.0 if step else 0.1) if mean else 0.0

    def _copy_duration(self) -> float:
        return 2 * (self.scenario.copy_time or 0.0) * self.rng.random()

    def _disk_duration(self) -> float:
        return 2 * self.scenario.disk_time * self.rng.random()
