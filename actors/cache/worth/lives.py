"""What each of the pool's states is, and what becomes of it: from that is learned which are gone on from."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.cache.worth.chances import Chances
from baton.actors.cache.worth.order import Order, ancestors
from baton.actors.kinds import Kind
from baton.actors.lease import Lease

# How many states that had to go are watched still, as a multiple of those that are kept.
GHOSTS = 16
# Wanted again within so many uses a state of the pool, it should have stayed. A request makes about as many.
SOON = 4
# So many ways that go on from a state make it a hub.
MANY = 4
# Of a conversation's other ways so many nodes are looked at.
OTHERS = 32
ENDS = (Kind.NEW, Kind.FRONTIER, Kind.SOON)
# What has shown its worth, or has a name, does not become what a client asks for.
PROVEN = (Kind.HUB, Kind.NAMED)
S = TypeVar("S")
State: TypeAlias = Node[Lease]


class Lives:
    """Told of all that becomes of a state, it keeps each node's kind, the order in which they go, and the chances.

    A part of the cache. Those that had to go are watched on, as ghosts: else nothing would be known of ages at which
    states are gone. counters: by kind, of states that were used, went, and were wanted soon after they went.
    """

    def __init__(self, tree: RadixTree[Lease], chances: Chances, order: Order[Lease], counters: Counter[str]) -> None:
        self._tree, self._chances, self._order, self._counters = tree, chances, order, counters
        self._ghosts: OrderedDict[State, None] = OrderedDict()

    def kept(self, node: State, kind: Kind) -> None:
        """A state has come to this node. kind: what it was asked for as, or that of a request's end."""
        self._ghosts.pop(node, None)
        node.since = 0
        self._become(node, Kind.BRANCH if len(node.children) > 1 and kind is not Kind.ASKED else kind)
        self._supersede(node)

    def came_again(self, node: State, kind: Kind) -> None:
        """Another request has come to a state that is kept already. To be called before the node is touched."""
        self._learn(node, used=False)
        node.since = 0
        lower = node.kind in (Kind.PROMPT_END, Kind.CHECKPOINT, Kind.INTERIOR)
        said = kind is Kind.SOON and node.kind in ENDS
        self._become(node, kind if (kind in ENDS and lower) or said else node.kind)

    def asked(self, node: State) -> None:
        """A client has asked for this state, which is there already."""
        if node.kind not in PROVEN:
            self._pass_on(node, Kind.ASKED)

    def end_kind(self, node: State, prompt: int) -> Kind:
        """Of a state where a request with a prompt of this length ends now: whether one ended above it before."""
        node.ended = True
        self._leave_others(node, prompt)
        return Kind.FRONTIER if any(step.ended for step in ancestors(node)) else Kind.NEW

    def _leave_others(self, node: State, prompt: int) -> None:
        """Where a conversation has taken another way before, that one is left. Where two only begin alike it is not."""
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

    def used(self, node: State) -> None:
        """A grant goes on from a copy of it. To be called before the node is touched."""
        self._learn(node, used=True)
        self._count("used", node)
        node.since = 0
        kind = kind_after(node)
        node.ways += 1
        self._become(node, kind)

    def moved(self, node: State) -> None:
        """Its state has gone with a grant."""
        self._learn(node, used=True)
        self._count("used", node)
        self._order.put(node, False)

    def went(self, node: State, copied: bool = False) -> None:
        """Its state has had to go. copied: whoever wants it goes on from its copy."""
        self._count("evicted", node)
        self._learn(node, used=False)
        self._order.put(node, False)
        node.since = self._age(node)
        self._ghosts[node] = None
        if node.kind in ENDS and not copied:
            self._inherit(node)
        if len(self._ghosts) > GHOSTS * (len(self._tree.states) + 1):
            self.forgotten(next(iter(self._ghosts)))

    def forgotten(self, node: State) -> None:
        """Whether somebody wants the state that this node had will not be known."""
        if node in self._ghosts:
            del self._ghosts[node]
            self._learn(node, used=False)

    def missed(self, node: State, copied: bool = False) -> None:
        """A grant would have gone on from the state that this node had; or does so, from its copy."""
        if node in self._ghosts:
            del self._ghosts[node]
            if not copied and self._age(node) - node.since <= SOON * len(self._tree.states):
                self._count("regretted", node)
            self._learn(node, used=True)

    def renamed(self, node: State) -> None:
        """A session's name has come to this node, or left it."""
        if node.state is not None and (node.kind is Kind.NAMED) != bool(node.sessions):
            self._pass_on(node, Kind.NAMED if node.sessions else Kind.LAST_END)

    def cleared(self, nodes: list[State]) -> None:
        """These were the tree's states, and it is a new one."""
        self._ghosts.clear()
        for node in nodes:
            self._order.put(node, False)

    def _supersede(self, node: State) -> None:
        """A conversation has come to this node."""
        for step, kind in superseded(node):
            self._pass_on(step, kind)

    def _inherit(self, node: State) -> None:
        """Who would have gone on from this end will go on from the next state above, where that is one of its own."""
        heir = next((step for step in ancestors(node) if step.state is not None), None)
        if heir is not None and heir.kind in (Kind.PROMPT_END, Kind.LAST_END, Kind.CHECKPOINT, Kind.INTERIOR):
            self._pass_on(heir, node.kind)
            heir.used = max(heir.used, node.used)
            heir.since = self._age(heir)

    def _pass_on(self, node: State, kind: Kind) -> None:
        if node.kind is not kind:
            self._learn(node, used=False)
            node.since = self._age(node)
            self._become(node, kind)

    def _become(self, node: State, kind: Kind) -> None:
        node.kind = kind
        self._order.put(node, True)

    def _learn(self, node: State, used: bool) -> None:
        """What became of it since it has been of its kind, by its age since it was used last."""
        self._chances.learn(node.kind, node.since, self._age(node), used)

    def _age(self, node: State) -> int:
        return self._tree.uses - node.used

    def _count(self, what: str, node: State) -> None:
        self._counters[f"states_{what}:{node.kind.label}"] += 1


def kind_after(node: Node[S]) -> Kind:
    """What a state is when one more has gone on from it: the last end of a conversation, or where some part."""
    if node.sessions:
        return Kind.NAMED
    if node.ways + 1 >= MANY:
        return Kind.HUB
    if node.kind is Kind.ASKED:
        return Kind.ASKED
    return Kind.LAST_END if node.kind in (*ENDS, Kind.LEFT, Kind.PROMPT_END, Kind.LAST_END) else Kind.BRANCH


def superseded(node: Node[S]) -> Iterator[tuple[Node[S], Kind]]:
    """What states above are when a conversation has come here: of its ends only the last is one to ask again from."""
    has_last = False
    for step in ancestors(node):
        if step.state is None:
            continue
        if step.kind is Kind.NAMED:
            has_last = True
        elif node.ended and step.kind in (*ENDS, Kind.LAST_END):
            yield step, Kind.INTERIOR if has_last else Kind.LAST_END
            has_last = True
