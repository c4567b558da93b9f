"""After each delivery: which state is to go next is known of every state, and what it saves is not thought too high.

And nobody waits for a state that another computes and that will not come.
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
    states, ghosts = cache.tree.states, vars(cache.eviction)["_ghosts"]
    assert not any(node in states for node in ghosts), "a state is watched as one that had to go"
    assert all(node in cache.tree.nodes for node in ghosts), "what has left the tree is still watched"
    for node in states:
        assert (node.kind is Kind.NAMED) == bool(node.sessions), f"node {node.id} is {node.kind.label}, or has no name"
        assert 0 <= node.since <= cache.tree.uses - node.used, f"node {node.id} is older than its kind"
    for node in cache.tree.nodes:
        check_denied(node)
    if isinstance(cache.eviction.order, ByWorth):
        check_queues(cache.eviction.order, cache)


def check_queues(order: "ByWorth", cache: Cache) -> None:
    """Each state is in one queue, that of its kind; and of what it saves, or of less where an ancestor has gone."""
    states, places = cache.tree.states, order._places
    assert places.keys() == states.keys(), "the order is not that of the tree's states"
    queued = [node for queue in order._queues.values() for node in queue]
    assert len(queued) == len(states), f"{len(queued)} places for {len(states)} states"
    for node, (kind, _) in places.items():
        assert kind is node.kind, f"node {node.id} is {node.kind.label}, and stands with those that are {kind.label}"
    for node in states:
        lower = list(states_below(node))
        if len(lower) < BELOW // 4:
            for each in lower:
                most = frexp(order._savings(each))[1]
                assert places[each][1] <= most, f"node {each.id} stands with those that save more"


def watch(tiers: HostAndDisk) -> None:
    """From now on no state is dropped that is worth a copy and has room for it, nor a session's copy for another's."""
    original_leave, original_reserve = tiers._leave, tiers.store.reserve

    def leave(node: Node[Lease], place: Any) -> None:
        store = tiers.store
        has_room = store.host_bytes + store.limits.memory_bytes(node.end) <= store.limits.host_bytes
        is_taken = store.tree.match(root_of(node).salt, tokens_to(node), node.end).node.end == node.end
        dropped = place is None and tiers.is_to_copy(node) and has_room and not is_taken
        assert not dropped, f"the state of node {node.id} is dropped, and a copy would pay"
        original_leave(node, place)

    def reserve(salt: str, tokens: Tokens, of: Node[Any] | None = None) -> tuple[Node[StateCopy], int] | None:
        named = dict(tiers.names.stored)
        found = original_reserve(salt, tokens, of)
        assert (of is not None and of.sessions) or named == tiers.names.stored, (
            "a session lost its copy to a stranger's"
        )
        return found

    tiers._leave, tiers.store.reserve = leave, reserve  # type: ignore[method-assign]


class MarkChecks:
    """What others wait for, as (grant, position).

    _asked: what the scheduler has been asked for. _saved: what a step that was sent saves. _refused: what the cache
    knows not to come.
    """

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._asked: set[tuple[int, int]] = set()
        self._saved: set[tuple[int, int]] = set()
        self._refused: set[tuple[int, int]] = set()

    def sent(self, message: Message) -> None:
        match message:
            case Passed(grant, position):
                on_its_way = (grant, position) in self._saved and grant in self._unit.scheduler.state.rows
                assert not on_its_way, f"the state of grant {grant} at {position} is on its way, and given up"
                self._asked.discard((grant, position))
            case Step(checkpoints=checkpoints):
                self._saved.update((saved.grant, saved.position) for saved in checkpoints)
                self._asked -= self._saved
            case Spare(grant, _, denied):
                self._refused.update((grant, position) for position in denied)
                self._asked.difference_update((grant, position) for position in denied)

    def arrives(self, message: Message) -> None:
        match message:
            case Mark(grant, position):
                self._asked |= {(grant, position)} - self._saved - self._refused
            case Passed(grant, position):
                self._refused.add((grant, position))

    def check_scheduler(self) -> None:
        """What others wait for is still to be computed; of what has passed they were told, or the row is gone."""
        rows = self._unit.scheduler.state.rows
        self._asked = {(grant, position) for grant, position in self._asked if grant in rows}
        for grant, position in self._asked:
            assert position in rows[grant].targets, f"others wait for grant {grant} at {position}, and none is told"

    def check_cache(self) -> None:
        accounts = self._unit.cache.accounts
        self._refused = {(grant, position) for grant, position in self._refused if grant in accounts}
        for grant, position in self._refused:
            assert position not in accounts[grant].marks, (
                f"a state of grant {grant} at {position} is waited for in vain"
            )
