"""Planted bugs in pauses of generation."""

from baton.actors.messages import Continue, Message, Pause
from baton.actors.scheduler import actor as scheduler
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Plan, SchedulerState
from baton.actors.scheduler.queue import Queue
from tests.simulation.planting import Patch


def paused_rows_keep_stepping(patch: Patch) -> None:
    """Planted bug: a pause in place admits no new requests, but the running rows keep stepping."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        if state.paused != "in_place":
            return original(state)
        state.paused, queue = None, state.queue
        state.queue = Queue()
        commands = original(state)
        state.paused, state.queue = "in_place", queue
        return commands

    patch(scheduler, "plan", plan)


def retracting_pause_keeps_the_slots(patch: Patch) -> None:
    """Planted bug: a pause with mode "retract" leaves the rows in their slots, as one with mode "in_place" does."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        commands = original(state)
        if state.paused:
            commands.retire = []
        return commands

    patch(scheduler, "plan", plan)


def retracting_pause_answered_too_early(patch: Patch) -> None:
    """Planted bug: a pause with mode "retract" is answered when no row is left, before slots and pages are returned."""

    def is_still(self: Scheduler, pause: Pause) -> bool:
        return self.state.in_flight == 0 and (pause.mode == "in_place" or not self.state.rows)

    patch(Scheduler, "_is_still", is_still)


def parked_acquires_stay_in_a_pause(patch: Patch) -> None:
    """Planted bug: an Acquire that was sent before a pause is granted during the pause, and its row keeps its slot."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        commands = original(state)
        if state.paused:
            commands.cancel, commands.retire = [], [each for each in commands.retire if not state.acquiring]
        return commands

    patch(scheduler, "plan", plan)


def continue_turns_into_a_pause_in_place(patch: Patch) -> None:
    """Planted bug: after a pause with mode "retract", `Continue` leaves the scheduler paused in place."""
    original = Scheduler.receive

    def receive(self: Scheduler, message: Message) -> None:
        paused = self.state.paused
        original(self, message)
        if isinstance(message, Continue) and paused == "retract":
            self.state.paused = "in_place"

    patch(Scheduler, "receive", receive)
