"""Some of a tree's nodes, in order of their last use: so whoever wants the oldest need not look at all the others."""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from actors.cache.radix import Node

S = TypeVar("S")
ROOM_FOR_GONE = 64


class ByAge(Generic[S]):
    """Nodes of which the least recently used is wanted next.

    Where a node goes, or is used, its entry in the heap stays until it is the lowest: only then is it looked at. So
    each call takes O(log n) for each change since the last one.
    """

    def __init__(self) -> None:
        self._nodes: set[Node[S]] = set()
        self._heap: list[tuple[int, Node[S]]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node[S]) -> bool:
        return node in self._nodes

    def put(self, node: Node[S], belongs: bool) -> None:
        """Whether this node is one of them, from now on."""
        if not belongs:
            self._nodes.discard(node)
        elif node not in self._nodes:
            self._nodes.add(node)
            if len(self._heap) > 2 * len(self._nodes) + ROOM_FOR_GONE:
                self._heap = [(node.used, node) for node in self._nodes]
                heapify(self._heap)
            else:
                heappush(self._heap, (node.used, node))

    def oldest(self) -> Node[S] | None:
        while self._heap:
            used, node = self._heap[0]
            if node not in self._nodes:
                heappop(self._heap)
            elif used != node.used:
                heapreplace(self._heap, (node.used, node))
            else:
                return node
        return None
