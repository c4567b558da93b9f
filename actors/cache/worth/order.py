"""Which of some states is to go next: the least recently used, or the one that is worth least."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import frexp, inf
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.cache.worth.chances import Chances
from baton.actors.kinds import Kind

S = TypeVar("S")
Policy: TypeAlias = Literal["worth", "lru"]
# How many at an end of a queue are found to save more or less at most, before one of them is taken as it is.
LOOKS = 8
# After so many uses, or as many as a share of the states, all queues are looked at anew; so much more is another worth.
LEAST_FRESH, FRESH_SHARE = 16, 32
RISEN = 1.05
# So many entries of a heap, and twice as many as there are states, may be of states that are gone.
ROOM_FOR_GONE = 64
# How many nodes below a new state are looked at for states that save less now.
BELOW = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """In any unit: to compute one token, and one token for each that stands before it (attention).

    slot, token: bytes of a state, and of the keys and values of one token.
    """

    compute: float = 1.0
    attend: float = 0.0
    slot: float = 1.0
    token: float = 0.0

    def saved(self, start: int, end: int) -> float:
        """By not computing the tokens [start, end)."""
        return (end - start) * self.compute + (end * end - start * start) / 2 * self.attend


PER_TOKEN = Costs()


def anyone(node: Node[S]) -> bool:
    return True


class Order(Protocol[S]):
    """Some of a tree's states, of which one is to go next. A part of the cache."""

    def __contains__(self, node: Node[S]) -> bool: ...

    def put(self, node: Node[S], belongs: bool) -> None:
        """Whether this node is one of them, from now on. To be called again when it was used, or is of another kind."""

    def least(self, may_go: Callable[[Node[S]], bool] = anyone) -> Node[S] | None:
        """The one that is to go next."""

    def worth(self, node: Node[S]) -> float:
        """The least of all goes next, or about the least."""

    def admits(self, kind: Kind, start: int, end: int, instead: Node[S], age: int = 0) -> bool:
        """Whether a state at `end`, with the next one above it at `start`, is worth more than one that is kept."""


Queue = OrderedDict[Node[S], None]
Place: TypeAlias = tuple[Kind, int]
Entry = tuple[float, int, Node[S], Place]


class ByWorth(Generic[S]):
    """What is worth least goes next: the chance that somebody goes on from it, times what that saves, over its bytes.

    Of each kind and magnitude of savings there is a queue in order of use. Its two ends, and what has come to it since
    they were looked at, stand in a heap by worth; they are looked at anew when some time has passed, or something was
    learned. So the cost grows with the number of queues, and not of states. What a state saves depends on its
    neighbours in the tree, and is looked at again when it is about to go.
    own: of how many tokens a state holds the keys and values: from `start`, where the next state above it is, to its
    end, and whether nothing goes on from it.
    """

    def __init__(
        self, tree: RadixTree[S], chances: Chances, costs: Costs, own: Callable[[int, int, bool], int] | None = None
    ) -> None:
        self._tree, self._chances, self._costs = tree, chances, costs
        self._own = own or kept_alone
        self._queues: dict[Place, Queue[S]] = {}
        self._places: dict[Node[S], Place] = {}
        self._heap: list[Entry[S]] = []
        self._entered: dict[Node[S], tuple[int, float]] = {}
        self._entries = 0
        self._fresh_until = 0
        self._learned = chances.learned

    def __contains__(self, node: Node[S]) -> bool:
        return node in self._places

    def put(self, node: Node[S], belongs: bool) -> None:
        if len(self._heap) > ROOM_FOR_GONE + 2 * len(self._places):
            self._look_at_all()  # Else what is gone would stay until somebody asks for the least.
        is_new = node not in self._places
        self._take_out(node)
        if belongs:
            self._put_in(node, last=True)
        if belongs and is_new:
            for lower in filter(self._places.__contains__, states_below(node)):
                self._take_out(lower)
                self._put_in(lower, last=True)

    def least(self, may_go: Callable[[Node[S]], bool] = anyone) -> Node[S] | None:
        """Where none at an end of its queue may go, whichever may."""
        if self._tree.uses >= self._fresh_until or self._learned != self._chances.learned:
            self._look_at_all()
        valid: list[Entry[S]] = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            worth, number, node, place = entry
            if self._entered.get(node, (0, 0.0))[0] != number:
                self._look_at(place)
            elif self.worth(node) > worth * RISEN:
                del self._entered[node]
                self._enter(node)
            else:
                valid.append(entry)
                found = node if may_go(node) else None
        for entry in valid:
            heappush(self._heap, entry)
        return found or next(filter(may_go, self._places), None)

    def admits(self, kind: Kind, start: int, end: int, instead: Node[S], age: int = 0) -> bool:
        return self._chances.index(kind, age) * self._per_byte(start, end, is_leaf=True) > self.worth(instead)

    def worth(self, node: Node[S]) -> float:
        """What it saves in a use of the pool, over its bytes, if it is kept for as long as it pays."""
        return self._chances.index(node.kind, self._tree.uses - node.used) * self._savings(node)

    def _look_at_all(self) -> None:
        self._heap.clear()
        self._entered.clear()
        for place in list(self._queues):
            self._look_at(place)
        self._fresh_until = self._tree.uses + max(LEAST_FRESH, len(self._places) // FRESH_SHARE)
        self._learned = self._chances.learned

    def _look_at(self, place: Place) -> None:
        """Enter both ends of a queue; those that have come to save more or less go to their own."""
        for last in (False, True):
            for _ in range(LOOKS):
                queue = self._queues.get(place)
                if not queue:
                    return
                node = next(reversed(queue) if last else iter(queue))
                if self._place(node) == place:
                    self._enter(node)
                    break
                self._take_out(node)
                self._put_in(node, last)

    def _enter(self, node: Node[S]) -> None:
        """Unless its entry says what it is worth."""
        worth = self.worth(node)
        if self._entered.get(node, (0, inf))[1] > worth * RISEN:
            self._entries += 1
            self._entered[node] = self._entries, worth
            heappush(self._heap, (worth, self._entries, node, self._places[node]))

    def _take_out(self, node: Node[S]) -> None:
        place = self._places.pop(node, None)
        self._entered.pop(node, None)
        if place is not None:
            del self._queues[place][node]
            if not self._queues[place]:
                del self._queues[place]

    def _put_in(self, node: Node[S], last: bool) -> None:
        place = self._places[node] = self._place(node)
        queue = self._queues.setdefault(place, OrderedDict())
        queue[node] = None
        queue.move_to_end(node, last)
        self._enter(node)

    def _place(self, node: Node[S]) -> Place:
        return node.kind, frexp(self._savings(node))[1]

    def _savings(self, node: Node[S]) -> float:
        """What one who goes on from here need not compute, over the bytes that nothing else keeps."""
        return self._per_byte(above(node), node.end, not node.children)

    def _per_byte(self, start: int, end: int, is_leaf: bool) -> float:
        own = self._own(start, end, is_leaf)
        return self._costs.saved(start, end) / (self._costs.slot + self._costs.token * own)


def kept_alone(start: int, end: int, is_leaf: bool) -> int:
    """In the pool it holds what nothing else does."""
    return end - start if is_leaf else 0


def whole_path(start: int, end: int, is_leaf: bool) -> int:
    """A copy below the pool holds everything."""
    return end


def states_below(node: Node[S]) -> Iterator[Node[S]]:
    """The next states below, as far as a look at a few nodes finds them."""
    nodes = deque(node.children.values())
    for _ in range(BELOW):
        if not nodes:
            return
        lower = nodes.popleft()
        if lower.state is not None:
            yield lower
        else:
            nodes.extend(lower.children.values())


def above(node: Node[S]) -> int:
    """The position of the next state above."""
    return next((step.end for step in ancestors(node) if step.state is not None), 0)


def ancestors(node: Node[S]) -> Iterator[Node[S]]:
    path = path_to_root(node)
    next(path)
    return path
