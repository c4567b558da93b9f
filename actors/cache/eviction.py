"""The seam to the eviction policy, and two plain policies: least recently used, and none."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from baton.actors.cache.radix import Node, RadixTree
from baton.actors.kinds import Kind
from baton.actors.lease import Lease


def any_node(node: Node[Any]) -> bool:
    return True


class EvictionPolicy(Protocol):
    """The choice of which cached state gives up its slot next, and of which states are worth a slot at all.

    The cache asks the questions of the first part, and reports everything that happens to a state with the methods of
    the second. A policy never takes a state out of the tree: the cache does so, and then reports `evicted`.

    The life of a state, as the reports describe it::

        donated ──▶ stored ──▶ resumed* ──▶ evicted ──▶ missed       a request would have resumed from it
                      │                        └──────▶ forgotten    its node has left the tree
                      └─────▶ moved             a grant took the slot itself along; `stored` again if it comes back
    """

    # Questions

    def keeps(self, node: Node[Lease], kind: Kind) -> bool:
        """Return whether a donated state is to be cached at `node`; otherwise its slot is freed at once."""

    def next_to_evict(self, may_go: Callable[[Node[Lease]], bool] = any_node) -> Node[Lease] | None:
        """Return the node whose state goes next among those for which `may_go` is true; None if no state may go."""

    def admits(self, kind: Kind, start: int, end: int, instead: Node[Lease]) -> bool:
        """Return whether a checkpoint is worth more than the cached state of `instead`, which would be evicted for it.

        kind: what the checkpoint is taken for
        start: position of the next state above it on its path, from which it would have to be computed otherwise
        end: its own position
        """

    def outranks(self, node: Node[Lease], other: Node[Lease]) -> bool:
        """Return whether a state from which a grant is about to resume is then worth more than the state of `other`."""

    def worth(self, node: Node[Lease]) -> float:
        """Return a number for people to compare states by: states with low numbers are evicted first."""

    def chances(self) -> Mapping[str, float]:
        """Return, for each kind's label, the estimated probability that a new state is ever used; empty if unknown."""

    # Reports

    def end_kind(self, node: Node[Lease], prompt: int) -> Kind:
        """Note that a request with a prompt of `prompt` tokens has ended at `node`; return the kind of its state."""

    def stored(self, node: Node[Lease], kind: Kind) -> None:
        """Note that a state is now cached at `node`. kind: what it was taken for."""

    def duplicated(self, node: Node[Lease], kind: Kind) -> None:
        """Note that another request has reached the state of `node`. Called before the node is touched."""

    def requested(self, node: Node[Lease]) -> None:
        """Note that a client has named the position of this cached state as one that it wants."""

    def resumed(self, node: Node[Lease]) -> None:
        """Note that a grant copies this state. Called before the node is touched."""

    def moved(self, node: Node[Lease]) -> None:
        """Note that a grant takes the slot of this state along."""

    def evicted(self, node: Node[Lease], copied: bool = False) -> None:
        """Note that this state leaves its slot. copied: a copy of it exists in a lower tier."""

    def missed(self, node: Node[Lease], copied: bool = False) -> None:
        """Note that a grant would have resumed from the state that this node had. copied: it resumes from its copy."""

    def forgotten(self, node: Node[Lease]) -> None:
        """Note that this node is about to leave the tree: whether its former state is missed will not be known."""

    def renamed(self, node: Node[Lease]) -> None:
        """Note that a session's name has come to the state of this node, or has left it."""

    def cleared(self, nodes: Collection[Node[Lease]]) -> None:
        """Note that the tree was flushed. nodes: those that had states."""


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


class NoEviction(LeastRecentlyUsed):
    """The policy that evicts nothing, because it caches nothing: donated states are freed, all prompts computed whole.

    A policy that cached states and never gave them up would let one prompt after another take a slot for ever, until
    no request could run. Without cached states every slot comes back when its request ends, so a request that finds
    none free has to wait only for those that run.
    """

    def keeps(self, node: Node[Lease], kind: Kind) -> bool:
        return False

    def next_to_evict(self, may_go: Callable[[Node[Lease]], bool] = any_node) -> Node[Lease] | None:
        return None

    def admits(self, kind: Kind, start: int, end: int, instead: Node[Lease]) -> bool:
        return False
