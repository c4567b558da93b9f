"""Planted bugs in the worth of states, and in how requests wait for a prefix that another request computes."""

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
from baton.actors.scheduler.plan import StepPlan
from baton.actors.scheduler.rows import RunningRows
from baton.actors.tokens import Tokens
from tests.simulation.planting import Patch


def kind_changed_without_requeueing(patch: Patch) -> None:
    """Planted bug: a state whose kind becomes LAST_END enters its new queue, but also stays in its old one."""
    original = Lives._pass_on

    def pass_on(self: Lives, node: Node[Lease], kind: Kind) -> None:
        places: Any = getattr(self.order, "_places", {})
        if kind is Kind.LAST_END:
            places.pop(node, None)
        original(self, node, kind)

    patch(Lives, "_pass_on", pass_on)


def worth_below_a_new_state_not_updated(patch: Patch) -> None:
    """Planted bug: when a state is stored above another, the lower one still counts as saving the whole path."""
    patch(order, "states_below", lambda node: iter(()))


def named_state_dropped_for_a_checkpoint(patch: Patch) -> None:
    """Planted bug: a checkpoint that nothing has resumed from so far takes the slot of a session's state."""
    original = Allocator._next_to_evict

    def next_to_evict(self: Allocator, keep: Node[Lease] | None = None, at_once: bool = False) -> Node[Lease] | None:
        return original(self, keep, False)

    patch(Allocator, "_next_to_evict", next_to_evict)


def state_dropped_instead_of_copied(patch: Patch) -> None:
    """Planted bug: a state without a name is dropped although a copy of it would pay."""

    def evict(self: HostAndDisk, node: Node[Lease]) -> None:
        self._leave(node, self._place_below(node) if node.sessions else None)

    patch(HostAndDisk, "evict", evict)


def session_copy_evicted_for_an_unnamed_one(patch: Patch) -> None:
    """Planted bug: the copy of a state without a name evicts a session's copy that is worth less."""
    original = CopyStore.reserve

    def reserve(
        self: CopyStore, salt: str, tokens: Tokens, of: Node[Any] | None = None
    ) -> tuple[Node[StateCopy], int] | None:
        return original(self, salt, tokens)

    patch(CopyStore, "reserve", reserve)


def copy_not_requeued(patch: Patch) -> None:
    """Planted bug: a copy whose file has been written stays in the queue of copies without a file."""
    original = ByWorth.put

    def put(self: ByWorth[Any], node: Node[Any], belongs: bool) -> None:
        if belongs or not isinstance(node.state, StateCopy):
            original(self, node, belongs)

    patch(ByWorth, "put", put)


def evicted_state_stays_queued(patch: Patch) -> None:
    """Planted bug: a state that has left its slot stays in the eviction order."""
    original = ByWorth.put

    def put(self: ByWorth[Lease], node: Node[Lease], belongs: bool) -> None:
        if belongs or node.sessions:
            original(self, node, belongs)

    patch(ByWorth, "put", put)


def waits_for_an_ended_leader(patch: Patch) -> None:
    """Planted bug: when the request that computes a shared prefix ends early, other requests keep waiting for it."""

    def is_waiting(self: Together, parked: Parked) -> bool:
        account = self._accounts.get(parked.leader) if parked.leader is not None else None
        return parked.leader is not None and (account is None or parked.waits_at in account.marks)

    patch(Together, "is_waiting", is_waiting)


def late_mark_not_answered(patch: Patch) -> None:
    """Planted bug: a `Mark` for a position that the row has already passed is not answered with `Passed`."""
    original = RunningRows.mark

    def mark(self: RunningRows, grant: int, position: int) -> None:
        row = self.state.rows.get(grant)
        if row is not None and row.position < position:
            original(self, grant, position)

    patch(RunningRows, "mark", mark)


def saved_state_reported_as_passed(patch: Patch) -> None:
    """Planted bug: a `Mark` for a state that a step in flight saves is answered with `Passed`."""
    original = RunningRows.mark

    def mark(self: RunningRows, grant: int, position: int) -> None:
        row = self.state.rows.get(grant)
        if row is not None:
            row.saved.clear()
        original(self, grant, position)

    patch(RunningRows, "mark", mark)


def missed_mark_not_reported(patch: Patch) -> None:
    """Planted bug: a step crosses a marked position without a checkpoint slot, and no `Passed` is sent."""
    original = RunningRows.step

    def step(self: RunningRows, step: StepPlan) -> None:
        for row in self.state.rows.values():
            row.marks.clear()
        original(self, step)

    patch(RunningRows, "step", step)


def passed_ignored(patch: Patch) -> None:
    """Planted bug: the cache receives `Passed` for a state and still lets other requests wait for it."""
    patch(Account, "pass_by", lambda self, position: self.passed.add(position))
