"""Checks of the eviction order, and of requests that wait for a prefix that another request computes.

After each delivery every state must be in the right queue and not be overrated, and no request may wait for a state
that will not come.
"""

from math import frexp
from typing import TYPE_CHECKING, Any

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.radix import Node, root_of, tokens_to
from baton.actors.cache.worth.order import BELOW, ByWorth, states_below
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.messages import Mark, Message, Passed, Spare, Step
from baton.actors.tokens import Tokens
from tests.simulation.checks_of_hints import check_denied

if TYPE_CHECKING:
    from tests.simulation.unit import Unit


def check_worth(cache: Cache) -> None:
    """Check kinds and ages of all states, the queues, and the ghosts (evicted states whose reuse is still counted)."""
    states, ghosts = cache.tree.states, vars(cache.eviction)["_ghosts"]
    assert not any(node in states for node in ghosts), "a state in the pool is watched as an evicted one"
    assert all(node in cache.tree.nodes for node in ghosts), "a node that left the tree is still watched"
    for node in states:
        assert (node.kind is Kind.NAMED) == bool(node.sessions), f"node {node.id} is {node.kind.label}, or has no name"
        assert 0 <= node.since <= cache.tree.uses - node.used, f"node {node.id} is older than its kind"
    for node in cache.tree.nodes:
        check_denied(node)
    if isinstance(cache.eviction.order, ByWorth):
        check_queues(cache.eviction.order, cache)


def check_queues(order: "ByWorth", cache: Cache) -> None:
    """Check that each state is in the queue of its kind, and that its recorded saving is not too high.

    The recorded saving may be too low after an ancestor's state was evicted.
    """
    states, places = cache.tree.states, order._places
    assert places.keys() == states.keys(), "the order is not that of the tree's states"
    queued = [node for queue in order._queues.values() for node in queue]
    assert len(queued) == len(states), f"{len(queued)} places for {len(states)} states"
    for node, (kind, _) in places.items():
        assert kind is node.kind, f"node {node.id} is {node.kind.label}, and is queued as {kind.label}"
    for node in states:
        lower = list(states_below(node))
        # When a state is stored, the order updates only a limited number of states below it.
        if len(lower) < BELOW // 4:
            for each in lower:
                most = frexp(order._savings(each))[1]
                assert places[each][1] <= most, f"node {each.id} is queued with states that save more"


def watch_losses(tiers: HostAndDisk) -> None:
    """Make `_leave` and `reserve` fail on two losses that must not happen.

    They are: dropping a state whose copy pays and fits, and evicting a session's copy for one without a name.
    """
    original_leave, original_reserve = tiers._leave, tiers.store.reserve

    def leave(node: Node[Lease], place: Any) -> None:
        store = tiers.store
        has_room = store.host_bytes + store.limits.memory_bytes(node.end) <= store.limits.host_bytes
        has_copy = store.tree.match(root_of(node).salt, tokens_to(node), node.end).node.end == node.end
        dropped = place is None and tiers.is_to_copy(node) and has_room and not has_copy
        assert not dropped, f"the state of node {node.id} is dropped, and a copy would pay"
        original_leave(node, place)

    def reserve(salt: str, tokens: Tokens, of: Node[Any] | None = None) -> tuple[Node[StateCopy], int] | None:
        named = dict(tiers.names.stored)
        found = original_reserve(salt, tokens, of)
        assert (of is not None and of.sessions) or named == tiers.names.stored, (
            "a session lost its copy to one without a name"
        )
        return found

    tiers._leave, tiers.store.reserve = leave, reserve  # type: ignore[method-assign]


class MarkChecks:
    """Checks of marked states: states that other requests wait for, each as (grant, position)."""

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._pending: set[tuple[int, int]] = set()  # marked, and neither saved nor refused so far
        self._saved: set[tuple[int, int]] = set()  # saved by a Step that has been sent
        self._refused: set[tuple[int, int]] = set()  # positions that the cache knows will have no state

    def on_send(self, message: Message) -> None:
        match message:
            case Passed(grant, position):
                is_saved = (grant, position) in self._saved and grant in self._unit.scheduler.state.rows
                assert not is_saved, f"the state of grant {grant} at {position} is saved, but reported as passed"
                self._pending.discard((grant, position))
            case Step(checkpoints=checkpoints):
                self._saved.update((saved.grant, saved.position) for saved in checkpoints)
                self._pending -= self._saved
            case Spare(grant, _, denied):
                self._refused.update((grant, position) for position in denied)
                self._pending.difference_update((grant, position) for position in denied)

    def on_delivery(self, message: Message) -> None:
        match message:
            case Mark(grant, position):
                self._pending |= {(grant, position)} - self._saved - self._refused
            case Passed(grant, position):
                self._refused.add((grant, position))

    def check_scheduler(self) -> None:
        """Drop the marks of rows that have ended. Check that other pending positions are wanted by their rows."""
        rows = self._unit.scheduler.state.rows
        self._pending = {(grant, position) for grant, position in self._pending if grant in rows}
        for grant, position in self._pending:
            assert position in rows[grant].targets, f"others wait for grant {grant} at {position}, which its row omits"

    def check_cache(self) -> None:
        """Check that no account is still marked at a position that the cache knows will have no state."""
        accounts = self._unit.cache.accounts
        self._refused = {(grant, position) for grant, position in self._refused if grant in accounts}
        for grant, position in self._refused:
            assert position not in accounts[grant].marks, f"a state of grant {grant} at {position} is still waited for"
