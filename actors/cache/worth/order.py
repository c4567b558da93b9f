"""The order in which states are evicted: by probability of use, times the computation that a use saves, per byte."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import frexp, inf
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from baton.actors.cache.eviction import any_node
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.cache.worth.chances import Chances
from baton.actors.kinds import Kind

S = TypeVar("S")
Policy: TypeAlias = Literal["worth", "lru"]
# A state's queue depends on what the state saves, which is recomputed only at an end of its queue. Each look at an end
# moves at most this many states to the queues where they belong now.
LOOKS = 8
# The heap is built again after max(LEAST_FRESH, number of states ÷ FRESH_SHARE) uses of the pool.
LEAST_FRESH, FRESH_SHARE = 16, 32
# A state's entry in the heap is replaced when the state's worth has changed by more than this factor.
RISEN = 1.05
# The heap is built again when its outdated entries outnumber the states by more than this.
ROOM_FOR_GONE = 64
# Below a new state, at most this many nodes are searched for states that save less now.
BELOW = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of computing tokens, all in one unit of any kind, and the bytes that states and tokens take."""

    compute: float = 1.0  # cost of computing one token, without attention
    attend: float = 0.0  # cost of attention: for each token, and each token before it
    slot: float = 1.0  # bytes of a state
    token: float = 0.0  # bytes of the keys and values of one token

    def saved(self, start: int, end: int) -> float:
        """Return the cost of computing the tokens [start, end), which a state at `end` saves."""
        return (end - start) * self.compute + (end * end - start * start) / 2 * self.attend


PER_TOKEN = Costs()


class Order(Protocol[S]):
    """A set of states of one tree, ordered by which state is evicted next."""

    def __contains__(self, node: Node[S]) -> bool: ...

    def put(self, node: Node[S], belongs: bool) -> None:
        """Add a node, or remove it. Call `put` again when the node's state was used or has changed its kind."""

    def least(self, may_go: Callable[[Node[S]], bool] = any_node) -> Node[S] | None:
        """Return the state to evict next, among states for which `may_go` is true; None if there is none."""

    def worth(self, node: Node[S]) -> float:
        """Return the number by which states are compared: the state to evict next has about the lowest."""

    def admits(self, kind: Kind, start: int, end: int, instead: Node[S], age: int = 0) -> bool:
        """Return whether a new state, which is not in the set, is worth more than `instead`, which is in the set.

        kind, age: kind and age of the new state
        start, end: position of the next state above the new state, and position of the new state
        """


Queue = OrderedDict[Node[S], None]  # states in order of use, the least recent first
Place: TypeAlias = tuple[Kind, int]  # the key of a queue: kind of its states, and binary exponent of their savings
Entry = tuple[float, int, Node[S], Place]  # worth, number of the entry, state, and key of the state's queue


class ByWorth(Generic[S]):
    """An Order in which the state of the least worth is evicted first.

    Worth is the state's index (`chances`: its expected uses per time) times the cost that a use saves, divided by the
    bytes that the state holds. The cost per byte is called the state's savings.

    Worth changes with every use, as states age, and with everything that is learned, so a heap of all states by worth
    would be out of date at once. But among states of one kind and of similar savings (within a factor of two), worth
    depends almost only on age. So there is one queue, in order of use, for each kind and magnitude of savings. Worth
    mostly rises or falls with age, so the state of least worth is assumed to be at one of the two ends of a queue.

    The heap holds the ends of all queues as of its last build, and every state that was put in a queue since then. It
    is built again after some uses of the pool, or when `chances` has learned. So the cost grows with the number of
    queues, not of states. A state's savings depend on its neighbours in the tree. They are computed again when the
    state is at an end of its queue or is next to be evicted.
    """

    def __init__(
        self, tree: RadixTree[S], chances: Chances, costs: Costs, own: Callable[[int, int, bool], int] | None = None
    ) -> None:
        """Create an empty order.

        own: returns the number of tokens whose keys and values are kept for one state alone. Its arguments are the
            position of the next state above, the state's position, and whether the state's node is a leaf.
        """
        self._tree, self._chances, self._costs = tree, chances, costs
        self._own = own or kept_alone
        self._queues: dict[Place, Queue[S]] = {}
        self._places: dict[Node[S], Place] = {}  # the key of each state's queue
        self._heap: list[Entry[S]] = []
        self._entered: dict[Node[S], tuple[int, float]] = {}  # number and worth of each state's valid entry
        self._entries = 0  # how many entries were ever made; the newest entry has this number
        self._fresh_until = 0  # the clock's value at which the heap is built again
        self._learned = chances.learned

    def __contains__(self, node: Node[S]) -> bool:
        return node in self._places

    def put(self, node: Node[S], belongs: bool) -> None:
        if len(self._heap) > ROOM_FOR_GONE + 2 * len(self._places):
            self._look_at_all()  # Otherwise outdated entries would pile up until the next call of `least`.
        is_new = node not in self._places
        self._take_out(node)
        if belongs:
            self._put_in(node, last=True)
        if belongs and is_new:
            # States below can now be computed from this new state, so they save less and belong in other queues.
            for lower in filter(self._places.__contains__, states_below(node)):
                self._take_out(lower)
                self._put_in(lower, last=True)

    def least(self, may_go: Callable[[Node[S]], bool] = any_node) -> Node[S] | None:
        """Return a state of about the least worth that `may_go`; if the heap has none, return any state that may."""
        if self._tree.uses >= self._fresh_until or self._learned != self._chances.learned:
            self._look_at_all()
        valid: list[Entry[S]] = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            worth, number, node, place = entry
            if self._entered.get(node, (0, 0.0))[0] != number:
                self._look_at(place)  # The entry is outdated, and the queue may have another end now.
            elif self.worth(node) > worth * RISEN:
                del self._entered[node]  # The state is worth more now than when it was entered.
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
        """Return the cost that a state saves per byte and use of the pool, if it is kept for as long as that pays."""
        return self._chances.index(node.kind, self._tree.uses - node.used) * self._savings(node)

    def _look_at_all(self) -> None:
        self._heap.clear()
        self._entered.clear()
        for place in list(self._queues):
            self._look_at(place)
        self._fresh_until = self._tree.uses + max(LEAST_FRESH, len(self._places) // FRESH_SHARE)
        self._learned = self._chances.learned

    def _look_at(self, place: Place) -> None:
        """Enter both ends of a queue into the heap. First move states there whose savings changed to other queues."""
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
        """Add an entry to the heap for a state, unless the worth in its present entry is about right or too low.

        With too high a worth the state would not be found. Too low a worth is corrected when the entry is the lowest.
        """
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
        """Return the cost that a request saves by resuming from this state, divided by the bytes that only it holds."""
        return self._per_byte(above(node), node.end, not node.children)

    def _per_byte(self, start: int, end: int, is_leaf: bool) -> float:
        own = self._own(start, end, is_leaf)
        return self._costs.saved(start, end) / (self._costs.slot + self._costs.token * own)


def kept_alone(start: int, end: int, is_leaf: bool) -> int:
    """Return how many tokens' KV only this pool state keeps: 0 unless its node is a leaf. Children keep the pages."""
    return end - start if is_leaf else 0


def whole_path(start: int, end: int, is_leaf: bool) -> int:
    """Return how many tokens' keys and values a copy below the pool holds: those of its whole path."""
    return end


def states_below(node: Node[S]) -> Iterator[Node[S]]:
    """Yield the nearest nodes below `node` that keep a state; the search visits at most BELOW nodes."""
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
    """Return the position of the next state above `node`; 0 if there is none."""
    return next((step.end for step in ancestors(node) if step.state is not None), 0)


def ancestors(node: Node[S]) -> Iterator[Node[S]]:
    """Yield the ancestors of `node`, the nearest first."""
    path = path_to_root(node)
    next(path)
    return path
