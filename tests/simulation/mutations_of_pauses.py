"""Known bugs in pauses of generation."""

from baton.actors.messages import Continue, Message, Pause
from baton.actors.scheduler import actor as scheduler
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Plan, SchedulerState
from baton.actors.scheduler.queue import Queue
from tests.simulation.planting import Patch


def paused_rows_step_on(patch: Patch) -> None:
    """A pause in place asks for no new requests, and those that run go on."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        if state.paused != "in_place":
            return original(state)
        state.paused, before = None, state.queue
        state.queue = Queue()
        commands = original(state)
        state.paused, state.queue = "in_place", before
        return commands

    patch(scheduler, "plan", plan)


def retracting_pause_keeps_the_slots(patch: Patch) -> None:
    """A pause that is to give back what runs holds keeps it instead, as one in place does."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        commands = original(state)
        if state.paused:
            commands.retire = []
        return commands

    patch(scheduler, "plan", plan)


def pause_answered_before_all_is_home(patch: Patch) -> None:
    """The word that all is given back comes as soon as no row is left, ahead of the slots and pages."""

    def is_still(self: Scheduler, pause: Pause) -> bool:
        return self.state.in_flight == 0 and (pause.mode == "in_place" or not self.state.rows)

    patch(Scheduler, "_is_still", is_still)


def parked_acquires_stay_in_a_pause(patch: Patch) -> None:
    """What was asked of the cache before a pause is granted in it, and keeps its slot."""
    original = scheduler.plan

    def plan(state: SchedulerState) -> Plan:
        commands = original(state)
        if state.paused:
            commands.cancel, commands.retire = [], [each for each in commands.retire if not state.acquiring]
        return commands

    patch(scheduler, "plan", plan)


def continuation_forgotten(patch: Patch) -> None:
    """After a pause that gave back what ran, word to go on leaves it paused in place."""
    original = Scheduler.receive

    def receive(self: Scheduler, message: Message) -> None:
        paused = self.state.paused
        original(self, message)
        if isinstance(message, Continue) and paused == "retract":
            self.state.paused = "in_place"

    patch(Scheduler, "receive", receive)
