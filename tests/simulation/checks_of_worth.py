"""After each delivery: which state is to go next is known of every state, and what it saves is not thought too high."""

from math import frexp
from typing import Any

from actors.cache.actor import Cache
from actors.cache.radix import Node, root_of, tokens_to
from actors.cache.state_copy import StateCopy
from actors.cache.tiers import Tiers
from actors.cache.worth.order import BELOW, ByWorth, states_below
from actors.kinds import Kind
from actors.lease import Lease
from actors.tokens import Tokens


def check_worth(cache: Cache) -> None:
    states, ghosts = cache.tree.states, vars(cache.lives)["_ghosts"]
    assert not any(node in states for node in ghosts), "a state is watched as one that had to go"
    assert all(node in cache.tree.nodes for node in ghosts), "what has left the tree is still watched"
    for node in states:
        assert (node.kind is Kind.NAMED) == bool(node.sessions), f"node {node.id} is {node.kind.label}, or has no name"
        assert 0 <= node.since <= cache.tree.uses - node.used, f"node {node.id} is older than its kind"
    if isinstance(cache.order, ByWorth):
        check_queues(cache.order, cache)


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


def watch(tiers: Tiers) -> None:
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
