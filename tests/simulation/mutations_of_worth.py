"""Known bugs in what states are worth, and in what requests wait for that others compute."""

from typing import Any

from baton.actors.cache.account import Account
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.radix import Node
from baton.actors.cache.together import Together
from baton.actors.cache.waiting import Parked
from baton.actors.cache.worth import order
from baton.actors.cache.worth.lives import Lives
from baton.actors.cache.worth.order import ByWorth
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import StepPlan
from baton.actors.tokens import Tokens
from tests.simulation.planting import Patch


def superseded_state_counted_twice(patch: Patch) -> None:
    """A state whose conversation has come further stands among the last ends, and still where it stood before."""
    original = Lives._pass_on

    def pass_on(self: Lives, node: Node[Lease], kind: Kind) -> None:
        places: Any = getattr(self.order, "_places", {})
        if kind is Kind.LAST_END:
            places.pop(node, None)
        original(self, node, kind)

    patch(Lives, "_pass_on", pass_on)


def worth_not_updated_after_a_split(patch: Patch) -> None:
    """Where a state comes to a path between two others, the lower one counts as if it still saved all of the path."""
    patch(order, "states_below", lambda node: iter(()))


def named_state_dropped_for_a_checkpoint(patch: Patch) -> None:
    """A checkpoint that nobody has ever gone on from takes the slot of a session."""
    original = Allocator._next_to_evict

    def next_to_evict(self: Allocator, keep: Node[Lease] | None = None, at_once: bool = False) -> Node[Lease] | None:
        return original(self, keep, False)

    patch(Allocator, "_next_to_evict", next_to_evict)


def demotion_that_loses_to_a_drop(patch: Patch) -> None:
    """A state without a name is dropped where its copy would pay."""

    def evict(self: HostAndDisk, node: Node[Lease]) -> None:
        self._leave(node, self._place_below(node) if node.sessions else None)

    patch(HostAndDisk, "evict", evict)


def session_s_copy_lost_to_a_stranger_s(patch: Patch) -> None:
    """A state without a name takes the room of a session's copy where that is worth less."""
    original = CopyStore.reserve

    def reserve(
        self: CopyStore, salt: str, tokens: Tokens, of: Node[Any] | None = None
    ) -> tuple[Node[StateCopy], int] | None:
        return original(self, salt, tokens)

    patch(CopyStore, "reserve", reserve)


def copy_stays_where_it_cannot_be(patch: Patch) -> None:
    """A copy that is written still stands among those that have no file."""
    original = ByWorth.put

    def put(self: ByWorth[Any], node: Node[Any], belongs: bool) -> None:
        if belongs or not isinstance(node.state, StateCopy):
            original(self, node, belongs)

    patch(ByWorth, "put", put)


def left_where_it_was(patch: Patch) -> None:
    """A state that has left its slot is still to go next."""
    original = ByWorth.put

    def put(self: ByWorth[Lease], node: Node[Lease], belongs: bool) -> None:
        if belongs or node.sessions:
            original(self, node, belongs)

    patch(ByWorth, "put", put)


def waits_for_one_that_is_gone(patch: Patch) -> None:
    """Where the request that computes for others ends early, they wait on."""

    def is_waiting(self: Together, parked: Parked) -> bool:
        account = self._accounts.get(parked.leader) if parked.leader is not None else None
        return parked.leader is not None and (account is None or parked.waits_at in account.marks)

    patch(Together, "is_waiting", is_waiting)


def late_mark_not_answered(patch: Patch) -> None:
    """A state is asked for where the prompt has passed it, and nobody is told that it will not come."""
    original = Scheduler._mark

    def mark(self: Scheduler, grant: int, position: int) -> None:
        row = self.state.rows.get(grant)
        if row is not None and row.position < position:
            original(self, grant, position)

    patch(Scheduler, "_mark", mark)


def state_on_its_way_given_up(patch: Patch) -> None:
    """A state is asked for that a step under way is about to save, and all are told that it will not come."""
    original = Scheduler._mark

    def mark(self: Scheduler, grant: int, position: int) -> None:
        row = self.state.rows.get(grant)
        if row is not None:
            row.saved.clear()
        original(self, grant, position)

    patch(Scheduler, "_mark", mark)


def missed_mark_not_told(patch: Patch) -> None:
    """A state that others wait for goes without a slot in the step that crosses it, and nobody is told."""
    original = Scheduler._step

    def step(self: Scheduler, step: StepPlan) -> None:
        for row in self.state.rows.values():
            row.marks.clear()
        original(self, step)

    patch(Scheduler, "_step", step)


def passed_not_believed(patch: Patch) -> None:
    """The cache is told that a state will not come, and has others wait on for it."""
    patch(Account, "pass_by", lambda self, position: self.passed.add(position))
