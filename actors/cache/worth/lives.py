"""The server's eviction policy: it tracks the kind of each cached state, and learns how often each kind is used."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias, TypeVar

from baton.actors.cache.eviction import any_node
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.cache.worth.chances import Chances
from baton.actors.cache.worth.order import Order, above, ancestors
from baton.actors.kinds import Kind
from baton.actors.lease import Lease

# At most this many ghosts (see Lives) for each cached state.
GHOSTS = 16
# An evicted state counts as "regretted" if it is missed within (SOON × number of cached states) uses of the pool.
# A request makes about SOON uses.
SOON = 4
# A state becomes a hub when this many grants have copied it.
MANY = 4
# When a conversation branches, at most this many nodes of its other branches are visited.
OTHERS = 32
ENDS = (Kind.NEW, Kind.FRONTIER, Kind.SOON)
# A state of these kinds keeps its kind when a client requests a state at its position.
PROVEN = (Kind.HUB, Kind.NAMED)
S = TypeVar("S")
State: TypeAlias = Node[Lease]


class Lives:
    """An EvictionPolicy that tracks the kind of each state, and learns how likely states of each kind are to be used.

    Every report about a state ends one observation and begins the next. An observation is: a state of this kind was
    watched from one age to another, and was used or not. An evicted state is still watched, as a *ghost*, until a
    grant would have resumed from it or its node leaves the tree. Without ghosts nothing could be learned about ages
    that states of a kind do not reach in the pool. `chances` turns observations into probabilities. `order` decides
    from these, or from age alone, which state is evicted next.
    """

    def __init__(self, tree: RadixTree[Lease], chances: Chances, order: Order[Lease], counters: Counter[str]) -> None:
        """counters: by kind, the states that were used, evicted, and missed soon after the eviction ("regretted")."""
        self.order = order
        self._tree, self._chances, self._counters = tree, chances, counters
        self._ghosts: OrderedDict[State, None] = OrderedDict()

    # Questions

    def keeps(self, node: State, kind: Kind) -> bool:
        return True

    def next_to_evict(self, may_go: Callable[[State], bool] = any_node) -> State | None:
        return self.order.least(may_go)

    def admits(self, kind: Kind, start: int, end: int, instead: State) -> bool:
        return self.order.admits(kind, start, end, instead)

    def outranks(self, node: State, other: State) -> bool:
        return self.order.admits(kind_after(node), above(node), node.end, other)

    def worth(self, node: State) -> float:
        return self.order.worth(node)

    def chances(self) -> Mapping[str, float]:
        return {kind.label: self._chances.chance(kind, 0) for kind in Kind}

    # Reports

    def end_kind(self, node: State, prompt: int) -> Kind:
        node.ended = True
        self._leave_others(node, prompt)
        return Kind.FRONTIER if any(step.ended for step in ancestors(node)) else Kind.NEW

    def _leave_others(self, node: State, prompt: int) -> None:
        """Set the ends of a conversation's other branches to the kind LEFT, now that the conversation ends at `node`.

        The branches separate at the nearest ancestor with several children. They belong to one conversation if they
        separate after the prompt, or if a request has ended further up. Otherwise two conversations only begin alike.
        """
        way = next(
            (step for step in path_to_root(node) if step.parent is not None and len(step.parent.children) > 1), None
        )
        if way is None or way.parent is None:
            return
        if way.start >= prompt - 1 or any(step.ended for step in path_to_root(way.parent)):
            others = deque(child for child in way.parent.children.values() if child is not way)
            for _ in range(OTHERS):
                if not others:
                    break
                other = others.popleft()
                others.extend(other.children.values())
                if other.state is not None and other.kind in ENDS:
                    self._pass_on(other, Kind.LEFT)

    def stored(self, node: State, kind: Kind) -> None:
        self._ghosts.pop(node, None)
        node.since = 0
        self._become(node, Kind.BRANCH if len(node.children) > 1 and kind is not Kind.ASKED else kind)
        self._supersede(node)

    def duplicated(self, node: State, kind: Kind) -> None:
        self._learn(node, used=False)
        node.since = 0
        is_lower = node.kind in (Kind.PROMPT_END, Kind.CHECKPOINT, Kind.INTERIOR)
        is_hinted = kind is Kind.SOON and node.kind in ENDS
        self._become(node, kind if (kind in ENDS and is_lower) or is_hinted else node.kind)

    def requested(self, node: State) -> None:
        if node.kind not in PROVEN:
            self._pass_on(node, Kind.ASKED)

    def resumed(self, node: State) -> None:
        self._learn(node, used=True)
        self._count("used", node)
        node.since = 0
        kind = kind_after(node)
        node.ways += 1
        self._become(node, kind)

    def moved(self, node: State) -> None:
        self._learn(node, used=True)
        self._count("used", node)
        self.order.put(node, False)

    def evicted(self, node: State, copied: bool = False) -> None:
        self._count("evicted", node)
        self._learn(node, used=False)
        self.order.put(node, False)
        node.since = self._age(node)
        self._ghosts[node] = None
        if node.kind in ENDS and not copied:
            self._inherit(node)
        if len(self._ghosts) > GHOSTS * (len(self._tree.states) + 1):
            self.forgotten(next(iter(self._ghosts)))

    def forgotten(self, node: State) -> None:
        if node in self._ghosts:
            del self._ghosts[node]
            self._learn(node, used=False)

    def missed(self, node: State, copied: bool = False) -> None:
        if node in self._ghosts:
            del self._ghosts[node]
            if not copied and self._age(node) - node.since <= SOON * len(self._tree.states):
                self._count("regretted", node)
            self._learn(node, used=True)

    def renamed(self, node: State) -> None:
        if node.state is not None and (node.kind is Kind.NAMED) != bool(node.sessions):
            self._pass_on(node, Kind.NAMED if node.sessions else Kind.LAST_END)

    def cleared(self, nodes: Collection[State]) -> None:
        self._ghosts.clear()
        for node in nodes:
            self.order.put(node, False)

    def _supersede(self, node: State) -> None:
        """Update the kinds of the states above `node`, because their conversation has now reached `node`."""
        for step, kind in superseded(node):
            self._pass_on(step, kind)

    def _inherit(self, node: State) -> None:
        """Give the kind and age of an evicted end to the next state above, from which the next turn will now resume.

        This applies only if the state above belongs to the same conversation: hubs and branches belong to several.
        """
        heir = next((step for step in ancestors(node) if step.state is not None), None)
        if heir is not None and heir.kind in (Kind.PROMPT_END, Kind.LAST_END, Kind.CHECKPOINT, Kind.INTERIOR):
            self._pass_on(heir, node.kind)
            heir.used = max(heir.used, node.used)
            heir.since = self._age(heir)

    def _pass_on(self, node: State, kind: Kind) -> None:
        """End the observation of a state under its old kind, and begin one under the new kind at its present age."""
        if node.kind is not kind:
            self._learn(node, used=False)
            node.since = self._age(node)
            self._become(node, kind)

    def _become(self, node: State, kind: Kind) -> None:
        node.kind = kind
        self.order.put(node, True)

    def _learn(self, node: State, used: bool) -> None:
        """Add an observation: a state of this kind, watched from age `since` to its present age."""
        self._chances.learn(node.kind, node.since, self._age(node), used)

    def _age(self, node: State) -> int:
        return self._tree.uses - node.used

    def _count(self, event: str, node: State) -> None:
        self._counters[f"states_{event}:{node.kind.label}"] += 1


def kind_after(node: Node[S]) -> Kind:
    """Return the kind of the state of `node` after one more grant has copied it.

    NAMED, HUB and ASKED come first, in this order. Otherwise the state becomes LAST_END if it was an end, because the
    grant continues its conversation; and BRANCH if it was not.
    """
    if node.sessions:
        return Kind.NAMED
    if node.ways + 1 >= MANY:
        return Kind.HUB
    if node.kind is Kind.ASKED:
        return Kind.ASKED
    return Kind.LAST_END if node.kind in (*ENDS, Kind.LEFT, Kind.PROMPT_END, Kind.LAST_END) else Kind.BRANCH


def superseded(node: Node[S]) -> Iterator[tuple[Node[S], Kind]]:
    """Yield each state above `node` that changes its kind because a request has ended at `node`, with the new kind.

    The nearest end above becomes LAST_END, for a client that regenerates or edits. Ends further up become INTERIOR, as
    does the nearest end if a state with a session's name lies between.
    """
    has_last = False
    for step in ancestors(node):
        if step.state is None:
            continue
        if step.kind is Kind.NAMED:
            has_last = True
        elif node.ended and step.kind in (*ENDS, Kind.LAST_END):
            yield step, Kind.INTERIOR if has_last else Kind.LAST_END
            has_last = True
