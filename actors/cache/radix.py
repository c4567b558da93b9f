"""The radix tree of token sequences: each node names the KV pages of its edge and may keep the state at its end.

There are two: of the pool's states, where a state is a lease, and of the copies below it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.actors.cache.pages import PagePool
from baton.actors.kinds import Kind
from baton.actors.requests import MissReason
from baton.actors.tokens import WIDTH, Tokens, common_prefix, count, cut

S = TypeVar("S")
WORST_FIRST: tuple[MissReason, ...] = ("evicted", "denied", "misaligned", "never_kept", "")


@dataclass(eq=False, slots=True)
class Node(Generic[S]):
    """Tokens [start, end) of a path. `pages` covers them; the first page may begin with entries of the path above.

    sessions: those that go on from its state. pins: open grants that go on from here. evicted: it had a state that had
    to go. used: when its state was used last, by the clock. kind: of its state, since that was of age `since`.
    ended: whether a request has ended here. ways: how often somebody went on from a copy. denied: positions of its
    tokens at which a client asked for a state, and none was kept. salt: set on roots only.
    """

    id: int
    tokens: Tokens
    start: int
    parent: "Node[S] | None"
    pages: list[int]
    children: "dict[bytes, Node[S]]" = field(default_factory=dict)
    state: S | None = None
    sessions: set[str] = field(default_factory=set)
    pins: int = 0
    evicted: bool = False
    used: int = 0
    kind: Kind = Kind.NEW
    since: int = 0
    ended: bool = False
    ways: int = 0
    denied: frozenset[int] = frozenset()
    salt: str = ""

    @property
    def end(self) -> int:
        return self.start + count(self.tokens)


@dataclass(slots=True)
class Clock:
    """uses: how often states were used, by which their age is counted."""

    uses: int = 0


@dataclass(frozen=True, slots=True)
class Match(Generic[S]):
    """How far the tree knows some tokens, and the deepest state on their path that may be used.

    node: that state's node, or the root if there is none. tokens: how many leading tokens the tree knows.
    miss_reason: why the state is not as deep as it might be, empty if it is. evicted: a deeper state had to go.
    denied: a client asked for one, and it was not kept. misaligned: one lies beyond what the tokens share or the limit
    allows. never_kept: there was none.
    lost: the node of the deepest state that might have been used and had to go, if it is deeper.
    parts: whether the tree goes on there, but not with these tokens.
    """

    node: Node[S]
    tokens: int
    miss_reason: MissReason
    lost: Node[S] | None = None
    parts: bool = False


class RadixTree(Generic[S]):
    """A radix tree of token sequences with states of type S at its nodes, and one root a salt.

    nodes: all but the roots. states: the nodes that keep a state. Both in order of use, the least recent first; of
    the nodes, each behind those that hang on it. bare: the leaves without a state.
    tokens: the number of tokens on all edges. epoch: how often the tree was cleared; nodes of an older epoch are no
    longer part of it. clock: the pool's tree and that of the copies below it have one.
    """

    def __init__(self, pages: PagePool, clock: Clock | None = None) -> None:
        self.pages = pages
        self.clock = clock or Clock()
        self.roots: dict[str, Node[S]] = {}
        self.nodes: OrderedDict[Node[S], None] = OrderedDict()
        self.states: OrderedDict[Node[S], None] = OrderedDict()
        self.bare: OrderedDict[Node[S], None] = OrderedDict()
        self.tokens = 0
        self.epoch = 0
        self._next_id = 0

    @property
    def uses(self) -> int:
        return self.clock.uses

    def match(self, salt: str, tokens: Tokens, limit: int) -> Match[S]:
        """The deepest state at or before `limit` on the path of `tokens`, and the length of the path that is known."""
        node = best = self._root(salt)
        known = 0
        miss_reason: MissReason = ""
        lost: Node[S] | None = None
        while child := node.children.get(cut(tokens, known, known + 1)):
            known += common_prefix(child.tokens, cut(tokens, known, known + count(child.tokens)))
            if child.state is not None and child.end <= min(known, limit):
                best, miss_reason, lost = child, "", None
            else:
                miss_reason = _worse(miss_reason, _miss_reason(child, min(known, limit)))
                lost = child if child.evicted and child.end <= min(known, limit) else lost
            if known < child.end:
                break
            node = child
        parts = known < count(tokens) and (known > node.end or bool(node.children))
        return Match(best, known, miss_reason if best.end < min(known, limit) else "", lost, parts)

    def deepest(self, salt: str, tokens: Tokens, limit: int) -> Node[S] | None:
        """The node of the deepest state at or before `limit` on the path of `tokens`."""
        node = self.match(salt, tokens, limit).node if salt in self.roots else None
        return node if node is not None and node.state is not None else None

    def page_table(self, node: Node[S]) -> list[int]:
        """The page of each page index on the path to node's end; of two nodes that share one, the deeper's is whole."""
        table: list[int] = []
        for step in reversed(list(path_to_root(node))):
            if step.pages:
                del table[step.start // self.pages.size :]
                table += step.pages
        return table

    def insert(self, node: Node[S], tokens: Tokens, table: list[int]) -> Node[S]:
        """The node that ends `tokens` behind `node`. Where the path is there already its pages stay.

        table: the page of each page index from the root on, of which a new node names those of its own range.
        """
        begin, goal = node.end, node.end + count(tokens)
        while node.end < goal:
            rest = tokens[(node.end - begin) * WIDTH :]
            child = node.children.get(rest[:WIDTH])
            if child is None:
                return self._extend(node, rest, self._span(table, node.end, goal))
            shared = common_prefix(child.tokens, rest)
            node = child if shared == count(child.tokens) else self._split(child, shared)
        return node

    def set_state(self, node: Node[S], state: S) -> None:
        node.state, node.evicted, node.denied = state, False, node.denied - {node.end}
        self.states[node] = None
        self.bare.pop(node, None)
        self._use(node)

    def take_state(self, node: Node[S]) -> S:
        state = node.state
        assert state is not None
        node.state = None
        del self.states[node]
        self._note_bare(node)
        return state

    def deny(self, node: Node[S], positions: Collection[int]) -> None:
        """Note that a client asked for states at these positions of the path to node, where there are none."""
        for step in path_to_root(node) if positions else ():
            step.denied |= {position for position in positions if step.start < position <= step.end}

    def touch(self, node: Node[S], with_state: bool = True) -> None:
        """Mark the path to node as used now, its root-most part as the latest; and its state."""
        for step in path_to_root(node):
            if step.parent is not None:
                self.nodes.move_to_end(step)
        if node in self.bare:
            self.bare.move_to_end(node)
        if node.state is not None and with_state:
            self.states.move_to_end(node)
            self._use(node)

    def unpin(self, node: Node[S]) -> None:
        node.pins -= 1
        self._trim(node)

    def remove(self, node: Node[S]) -> None:
        """Take a leaf without state out of the tree; grants that go on from it go on from its parent."""
        assert node.parent is not None and not node.children and node.state is None
        node.parent.pins += node.pins
        del node.parent.children[node.tokens[:WIDTH]]
        del self.nodes[node], self.bare[node]
        self.tokens -= count(node.tokens)
        self.pages.drop_node_refs(node.pages)
        self._note_bare(node.parent)
        self._trim(node.parent)

    def clear(self) -> list[Node[S]]:
        """Begin a new epoch; returns the nodes of the old one that keep a state."""
        stateful = list(self.states)
        for node in self.nodes:
            self.pages.drop_node_refs(node.pages)
        self.roots.clear()
        self.nodes.clear()
        self.states.clear()
        self.bare.clear()
        self.tokens = 0
        self.epoch += 1
        return stateful

    def _root(self, salt: str) -> Node[S]:
        if salt not in self.roots:
            self._next_id += 1
            self.roots[salt] = Node(self._next_id, b"", 0, None, [], salt=salt)
        return self.roots[salt]

    def _use(self, node: Node[S]) -> None:
        self.clock.uses += 1
        node.used = self.clock.uses

    def _note_bare(self, node: Node[S]) -> None:
        if node.parent is not None and not node.children and node.state is None:
            self.bare[node] = None

    def _trim(self, node: Node[S]) -> None:
        """Forget a root that nothing hangs on."""
        if node.parent is None and not node.children and not node.pins and self.roots.get(node.salt) is node:
            del self.roots[node.salt]

    def _extend(self, node: Node[S], tokens: Tokens, pages: list[int]) -> Node[S]:
        """Add a leaf. Where it begins inside a page its own page holds all that the path above has in that page."""
        size = self.pages.size
        first = node.end // size
        for step in path_to_root(node):
            if not pages or step.end <= first * size or not step.pages:
                break
            self.pages.add_node_refs(pages[:1])
            self.pages.drop_node_refs(step.pages[-1:])
            step.pages[-1] = pages[0]
        self.bare.pop(node, None)
        leaf = self._add(tokens, node, pages)
        self.bare[leaf] = None
        return leaf

    def _add(self, tokens: Tokens, parent: Node[S], pages: list[int]) -> Node[S]:
        self._next_id += 1
        node = Node(self._next_id, tokens, parent.end, parent, pages)
        parent.children[tokens[:WIDTH]] = node
        self.nodes[node] = None
        self.tokens += count(tokens)
        self.pages.add_node_refs(pages)
        return node

    def _split(self, node: Node[S], length: int) -> Node[S]:
        """Cut node after its first `length` tokens; returns the new upper half. Both name a page across the cut."""
        parent, at = node.parent, node.start + length
        assert parent is not None
        old = node.pages
        self.tokens -= length
        upper = self._add(cut(node.tokens, 0, length), parent, self._span(old, node.start, at, node.start))
        lower_pages = self._span(old, at, node.end, node.start)
        self.pages.add_node_refs(lower_pages)
        self.pages.drop_node_refs(old)
        node.tokens, node.start, node.parent, node.pages = node.tokens[length * WIDTH :], at, upper, lower_pages
        upper.denied = frozenset(position for position in node.denied if position <= at)
        node.denied -= upper.denied
        upper.children[node.tokens[:WIDTH]] = node
        return upper

    def _span(self, table: list[int], start: int, end: int, first: int = 0) -> list[int]:
        """The pages of positions [start, end) out of a table that begins with the page of position `first`."""
        base = first // self.pages.size
        return table[start // self.pages.size - base : -(-end // self.pages.size) - base]


def _miss_reason(node: Node[S], usable: int) -> MissReason:
    """Why a node on the path gives no state at or before `usable`."""
    if node.evicted and node.end <= usable:
        return "evicted"
    if any(position <= usable for position in node.denied):
        return "denied"
    return "misaligned" if node.state is not None else "never_kept"


def _worse(one: MissReason, other: MissReason) -> MissReason:
    """Of two reasons on one path, the one that says more."""
    return next(reason for reason in WORST_FIRST if reason in (one, other))


def path_to_root(node: Node[S]) -> Iterator[Node[S]]:
    """From node up to its root."""
    step: Node[S] | None = node
    while step is not None:
        yield step
        step = step.parent


def tokens_to(node: Node[S]) -> Tokens:
    """Every token from the root to node's end."""
    return b"".join(reversed([step.tokens for step in path_to_root(node)]))


def root_of(node: Node[S]) -> Node[S]:
    *_, root = path_to_root(node)
    return root
