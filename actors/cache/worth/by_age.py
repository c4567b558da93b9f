"""A set of tree nodes that finds the least recently used node without searching all of them."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from baton.actors.cache.eviction import any_node
from baton.actors.cache.radix import Node
from baton.actors.cache.worth.order import ROOM_FOR_GONE
from baton.actors.kinds import Kind

S = TypeVar("S")


class ByAge(Generic[S]):
    """An Order in which the least recently used state is evicted next, and a new state is worth more than any other.

    A heap orders the nodes by last use. When a node is removed or used, its entry in the heap stays as it is, and is
    corrected when it becomes the lowest entry. So a call of `least` takes O(log n) for each change since the last call.
    """

    def __init__(self) -> None:
        self._nodes: set[Node[S]] = set()
        self._heap: list[tuple[int, int, Node[S]]] = []  # last use and id of a node when it was entered, and the node

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node[S]) -> bool:
        return node in self._nodes

    def put(self, node: Node[S], belongs: bool) -> None:
        if not belongs:
            self._nodes.discard(node)
        elif node not in self._nodes:
            self._nodes.add(node)
            if len(self._heap) > 2 * len(self._nodes) + ROOM_FOR_GONE:
                self._heap = [(node.used, node.id, node) for node in self._nodes]
                heapify(self._heap)
            else:
                heappush(self._heap, (node.used, node.id, node))

    def least(self, may_go: Callable[[Node[S]], bool] = any_node) -> Node[S] | None:
        found = None
        passed_over: list[tuple[int, int, Node[S]]] = []
        while self._heap and found is None:
            used, _, node = self._heap[0]
            if node not in self._nodes:
                heappop(self._heap)
            elif used != node.used:
                heapreplace(self._heap, (node.used, node.id, node))
            elif may_go(node):
                found = node
            else:
                passed_over.append(heappop(self._heap))
        for entry in passed_over:
            heappush(self._heap, entry)
        return found

    def worth(self, node: Node[S]) -> float:
        return float(node.used)

    def admits(self, kind: Kind, start: int, end: int, instead: Node[S], age: int = 0) -> bool:
        return True
