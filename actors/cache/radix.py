"""The radix tree of token sequences: each node names the KV pages of its edge and may keep the state at its end.

In the pool's tree a state is a lease. The tiers keep a second tree, whose states are copies in host memory or files.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from baton.actors.cache.pages import PagePool
from baton.actors.kinds import Kind
from baton.actors.requests import MissReason
from baton.actors.tokens import WIDTH, Tokens, common_prefix, count, cut

S = TypeVar("S")
MOST_TELLING_FIRST: tuple[MissReason, ...] = ("evicted", "denied", "misaligned", "never_kept", "")


@dataclass(eq=False, slots=True)
class Node(Generic[S]):
    """A node of the tree: the tokens [start, end) of a path, and perhaps the state at `end`."""

    id: int
    tokens: Tokens
    start: int
    parent: "Node[S] | None"
    pages: list[int]  # KV pages of [start, end); the first page may begin with the entries of tokens before `start`
    children: "dict[bytes, Node[S]]" = field(default_factory=dict)  # by the first token of each child
    state: S | None = None
    sessions: set[str] = field(default_factory=set)  # ids of the sessions that have their name on this node's state
    pins: int = 0  # number of open grants whose account refers to this node
    evicted: bool = False  # whether this node's last state was evicted
    used: int = 0  # the clock's value when this node's state was last used
    kind: Kind = Kind.NEW  # the kind of this node's state
    since: int = 0  # the state's age, in uses of the pool (see Clock), when it became of this kind
    ended: bool = False  # whether a request has ended at `end`
    ways: int = 0  # how many grants have copied this node's state
    denied: frozenset[int] = frozenset()  # positions in (start, end] where a client wanted a state and none was kept
    salt: str = ""  # the namespace of all paths below the root; set on roots only

    @property
    def end(self) -> int:
        return self.start + count(self.tokens)


# A copy below the pool: a node of the tiers' own tree. The cache reads only its `end`, and hands the node to the tiers.
LowerCopy: TypeAlias = Node[Any]


@dataclass(slots=True)
class Clock:
    """The clock that measures the age of states. It counts uses of the pool, not seconds."""

    uses: int = 0  # how often any state was used or stored


@dataclass(frozen=True, slots=True)
class Match(Generic[S]):
    """The result of a lookup: how many leading tokens the tree knows, and the deepest usable state on their path."""

    node: Node[S]  # the node of the deepest usable state, or the root if there is none
    tokens: int  # how many leading tokens the tree knows
    last: Node[S]  # the node that the last known token is in; the root if no token is known
    miss_reason: MissReason
    """Why no deeper state can be used; empty if the state of `node` is at the last known token or at the limit:

    evicted: there was a deeper state, which was evicted
    denied: a client asked for a deeper state, and it was not kept
    misaligned: the next state lies beyond the shared tokens or beyond the limit
    never_kept: no deeper state was ever kept
    """
    lost: Node[S] | None = None  # the deepest node after `node` whose state was evicted and would have been usable
    parts: bool = False  # whether tree and sequence both continue after the known `tokens`, but with different tokens


class RadixTree(Generic[S]):
    """A radix tree of token sequences with states of type S at its nodes, and one root for each salt."""

    def __init__(self, pages: PagePool, clock: Clock | None = None) -> None:
        """clock: the clock of another tree, to share it (the tree of copies shares the pool's); None: a new clock."""
        self.pages = pages
        self.clock = clock or Clock()
        self.roots: dict[str, Node[S]] = {}
        # `nodes`, `states`, `bare`: in order of use, the least recent first. In `nodes` descendants precede ancestors.
        self.nodes: OrderedDict[Node[S], None] = OrderedDict()  # all but the roots
        self.states: OrderedDict[Node[S], None] = OrderedDict()  # the nodes that keep a state
        self.bare: OrderedDict[Node[S], None] = OrderedDict()  # the leaves without a state
        self.tokens = 0  # number of tokens of all nodes
        self.epoch = 0  # how often the tree was cleared; nodes of an older epoch are no longer in the tree
        self.changed: dict[Node[S], None] | None = None  # the nodes that got or lost a state, if someone collects them
        self._next_id = 0

    @property
    def uses(self) -> int:
        return self.clock.uses

    def match(self, salt: str, tokens: Tokens, limit: int) -> Match[S]:
        """Find the deepest state at or before `limit` on the path of `tokens`, and how many of them the tree knows."""
        node = best = last = self._root(salt)
        known = 0
        miss_reason: MissReason = ""
        lost: Node[S] | None = None
        while child := node.children.get(cut(tokens, known, known + 1)):
            known += common_prefix(child.tokens, cut(tokens, known, known + count(child.tokens)))
            last = child
            if child.state is not None and child.end <= min(known, limit):
                best, miss_reason, lost = child, "", None
            else:
                miss_reason = _worse(miss_reason, _miss_reason(child, min(known, limit)))
                lost = child if child.evicted and child.end <= min(known, limit) else lost
            if known < child.end:
                break
            node = child
        parts = known < count(tokens) and (known > node.end or bool(node.children))
        return Match(best, known, last, miss_reason if best.end < min(known, limit) else "", lost, parts)

    def deepest(self, salt: str, tokens: Tokens, limit: int) -> Node[S] | None:
        """Return the node of the deepest state at or before `limit` on the path of `tokens`; None if there is none."""
        node = self.match(salt, tokens, limit).node if salt in self.roots else None
        return node if node is not None and node.state is not None else None

    def page_table(self, node: Node[S]) -> list[int]:
        """Return the page table of the path to `node`: the page at each page index, from the root to the node's end.

        Where two nodes share a page index, the table has the deeper node's page: it holds the entries of both nodes.
        """
        table: list[int] = []
        for step in reversed(list(path_to_root(node))):
            if step.pages:
                del table[step.start // self.pages.size :]
                table += step.pages
        return table

    def whole_pages(self, match: Match[S], end: int) -> list[int]:
        """Return the full pages of the known tokens before `end`. Nodes keep their pages when their states leave."""
        return self.page_table(match.last)[: min(match.tokens, end) // self.pages.size]

    def insert(self, node: Node[S], tokens: Tokens, table: list[int]) -> Node[S]:
        """Return the node at the end of `tokens`, which continue from `node`; add nodes where that path is missing.

        table: the page table of the whole path. A new node names the pages of its own range. Nodes that exist already
        keep their pages.
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
        self.note(node)
        self.bare.pop(node, None)
        self._use(node)

    def take_state(self, node: Node[S]) -> S:
        state = node.state
        assert state is not None
        node.state = None
        del self.states[node]
        self.note(node)
        self._note_bare(node)
        return state

    def note(self, node: Node[S]) -> None:
        """Note that the state of a node has come, gone or changed."""
        if self.changed is not None:
            self.changed[node] = None

    def deny(self, node: Node[S], positions: Collection[int]) -> None:
        """Note that a client asked for states at these positions of the path to `node`, and that none were kept."""
        for step in path_to_root(node) if positions else ():
            step.denied |= {position for position in positions if step.start < position <= step.end}

    def touch(self, node: Node[S], with_state: bool = True) -> None:
        """Mark the path to `node` as used now, and the state of `node` too if `with_state`.

        The node next to the root becomes the most recent one, so that leaves are evicted before their ancestors.
        """
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
        """Remove a leaf that has no state. Its parent takes over its pins: the caller has moved the accounts there."""
        assert node.parent is not None and not node.children and node.state is None
        node.parent.pins += node.pins
        del node.parent.children[node.tokens[:WIDTH]]
        del self.nodes[node], self.bare[node]
        self.tokens -= count(node.tokens)
        self.pages.drop_node_refs(node.pages)
        self._note_bare(node.parent)
        self._trim(node.parent)

    def clear(self) -> list[Node[S]]:
        """Begin a new epoch with an empty tree; return the nodes of the old epoch that have a state."""
        stateful = list(self.states)
        for node in stateful:
            self.note(node)
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
        """Forget `node` if it is a root without children and pins."""
        if node.parent is None and not node.children and not node.pins and self.roots.get(node.salt) is node:
            del self.roots[node.salt]

    # A leaf that begins inside a page (here: pages of 4 positions, a path that ends at 6, a leaf up to 10).
    #
    #     position        0   1   2   3 │ 4   5   6   7 │ 8   9
    #     path above      ├─────────────────────┤
    #       pages before  [      A      ] [  B  .  .  ]               B holds the entries 4 and 5
    #     leaf                                  ├─────────────┤
    #       its pages                     [  C          ] [  D  .  ]  C holds 4 to 7: the grant copied 4 and 5 from B
    #       pages after   [      A      ] [  C  .  .  ]               the path above names C, and B loses a reference
    #
    # Every node above with entries at page index 1 names C from now on, so that B is freed if nothing else uses it.
    # If a leaf begins at a page boundary, its first page holds no entries of the path above, and nothing changes.

    def _extend(self, node: Node[S], tokens: Tokens, pages: list[int]) -> Node[S]:
        """Add a leaf below `node`. Nodes above with entries at its first page index name the leaf's page instead."""
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
        """Cut `node` after its first `length` tokens; return the new upper half.

        `node` becomes the lower half and keeps its state. If the cut is inside a page, both halves name that page.
        """
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
        """Return the pages of positions [start, end) from a table that begins with the page of position `first`."""
        base = first // self.pages.size
        return table[start // self.pages.size - base : -(-end // self.pages.size) - base]


def _miss_reason(node: Node[S], usable: int) -> MissReason:
    """Return why a node on the path offers no state at or before `usable`."""
    if node.evicted and node.end <= usable:
        return "evicted"
    if any(position <= usable for position in node.denied):
        return "denied"
    return "misaligned" if node.state is not None else "never_kept"


def _worse(one: MissReason, other: MissReason) -> MissReason:
    """Return the more informative of two miss reasons."""
    return next(reason for reason in MOST_TELLING_FIRST if reason in (one, other))


def path_to_root(node: Node[S]) -> Iterator[Node[S]]:
    """Yield `node` and its ancestors, the root last."""
    step: Node[S] | None = node
    while step is not None:
        yield step
        step = step.parent


def tokens_to(node: Node[S]) -> Tokens:
    """Return every token from the root to node's end."""
    return b"".join(reversed([step.tokens for step in path_to_root(node)]))


def root_of(node: Node[S]) -> Node[S]:
    """Return the root above `node`. Only the root knows the salt."""
    *_, root = path_to_root(node)
    return root
