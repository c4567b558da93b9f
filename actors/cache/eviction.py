"""The interface to the eviction policy, and two plain policies: least recently used, and no caching at all."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from baton.actors.cache.radix import Node, RadixTree
from baton.actors.kinds import Kind
from baton.actors.lease import Lease


def any_node(node: Node[Any]) -> bool:
    return True


class EvictionPolicy(Protocol):
    """The interface that decides which cached state is evicted next, and which states are worth a slot at all.

    The cache calls the methods under "Questions" to decide. It calls those under "Reports" for everything that happens
    to a state. An eviction policy never takes a state out of the tree: the cache does so, and reports `evicted`.

    The life of a state, as the reports describe it::

        donated ──▶ stored ──▶ resumed* ──▶ evicted ──▶ missed       a request would have resumed from the state
                      │                        └──────▶ forgotten    the state's node has left the tree
                      └─────▶ moved             the slot itself moved to a grant; `stored` again if it comes back unused
    """

    # Questions

    def keeps(self, node: Node[Lease], kind: Kind) -> bool:
        """Return whether a donated state is to be cached at `node`; otherwise its slot is freed at once."""

    def next_to_evict(self, may_go: Callable[[Node[Lease]], bool] = any_node) -> Node[Lease] | None:
        """Return the node whose state is evicted next, of those for which `may_go` is true; None if there is none."""

    def admits(self, kind: Kind, start: int, end: int, instead: Node[Lease]) -> bool:
        """Return whether a checkpoint is worth more than the cached state of `instead`, which would be evicted for it.

        kind: what the checkpoint is taken for
        start: position of the next state above the checkpoint, from which the checkpoint's state would be recomputed
        end: position of the checkpoint
        """

    def outranks(self, node: Node[Lease], other: Node[Lease]) -> bool:
        """Return whether the state of `node`, once a grant has resumed from it, is worth more than that of `other`."""

    def worth(self, node: Node[Lease]) -> float:
        """Return the worth of a state for debugging output: states with low numbers are evicted first."""

    def chances(self) -> Mapping[str, float]:
        """Return the estimated probability that a new state is ever used, by label of its kind; empty if unknown."""

    # Reports

    def end_kind(self, node: Node[Lease], prompt: int) -> Kind:
        """Note that a request has ended at `node`; return the kind of its end state. prompt: length of its prompt."""

    def stored(self, node: Node[Lease], kind: Kind) -> None:
        """Note that a state is now cached at `node`. kind: the state's kind at first."""

    def duplicated(self, node: Node[Lease], kind: Kind) -> None:
        """Note that a state was donated that `node` has already. Called before the node's age is reset."""

    def requested(self, node: Node[Lease]) -> None:
        """Note that a client has requested a state at the position of this cached state."""

    def resumed(self, node: Node[Lease]) -> None:
        """Note that a grant copies this state. Called before the state's age is reset."""

    def moved(self, node: Node[Lease]) -> None:
        """Note that the slot of this state moves to a grant."""

    def evicted(self, node: Node[Lease], copied: bool = False) -> None:
        """Note that this state leaves its slot. copied: whether a copy of it exists or is made below the pool."""

    def missed(self, node: Node[Lease], copied: bool = False) -> None:
        """Note that a grant would have resumed from this node's evicted state. copied: whether a copy replaces it."""

    def forgotten(self, node: Node[Lease]) -> None:
        """Note that this node is about to leave the tree. Its evicted state cannot be reported as missed any more."""

    def renamed(self, node: Node[Lease]) -> None:
        """Note that a session's name was put on the state of this node, or removed from it."""

    def cleared(self, nodes: Collection[Node[Lease]]) -> None:
        """Note that the tree was flushed. nodes: the nodes that had states."""


class LeastRecentlyUsed:
    """The policy that evicts the state that was used least recently. A new state is worth more than any cached one."""

    def __init__(self, tree: RadixTree[Lease]) -> None:
        self._tree = tree

    def keeps(self, node: Node[Lease], kind: Kind) -> bool:
        return True

    def next_to_evict(self, may_go: Callable[[Node[Lease]], bool] = any_node) -> Node[Lease] | None:
        return next(filter(may_go, self._tree.states), None)

    def admits(self, kind: Kind, start: int, end: int, instead: Node[Lease]) -> bool:
        return True

    def outranks(self, node: Node[Lease], other: Node[Lease]) -> bool:
        return True

    def worth(self, node: Node[Lease]) -> float:
        return float(node.used)

    def chances(self) -> Mapping[str, float]:
        return {}

    def end_kind(self, node: Node[Lease], prompt: int) -> Kind:
        return Kind.NEW

    def stored(self, node: Node[Lease], kind: Kind) -> None:
        node.kind = kind

    def duplicated(self, node: Node[Lease], kind: Kind) -> None:
        pass

    def requested(self, node: Node[Lease]) -> None:
        pass

    def resumed(self, node: Node[Lease]) -> None:
        pass

    def moved(self, node: Node[Lease]) -> None:
        pass

    def evicted(self, node: Node[Lease], copied: bool = False) -> None:
        pass

    def missed(self, node: Node[Lease], copied: bool = False) -> None:
        pass

    def forgotten(self, node: Node[Lease]) -> None:
        pass

    def renamed(self, node: Node[Lease]) -> None:
        pass

    def cleared(self, nodes: Collection[Node[Lease]]) -> None:
        pass
