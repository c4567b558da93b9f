"""Changes among the cached states, for other processes: states by digest, with the tier that each is in."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.state_copy import StateCopy, copy_of
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.requests import Tier
from baton.actors.runtime.digests import Digester

MOST_AT_ONCE = 256
"""The most changes of a tree that one call of `look` handles, so that no call takes long; the next handles the rest."""


@dataclass(slots=True)
class WatchedState:
    """A state that is cached, in the pool or below it."""

    position: int  # tokens that the state has consumed
    in_pool: bool = False
    below: Tier | None = None  # the tier of its copy; None: there is no copy

    @property
    def tier(self) -> Tier | None:
        """The fastest tier that the state is in; None if it is in none."""
        return "slot" if self.in_pool else self.below


class StateWatch:
    """The cached states of a cache. Only one watch of a cache learns of its changes."""

    def __init__(self, cache: Cache, copies: RadixTree[StateCopy] | None, digester: Digester) -> None:
        """copies: the tree of the copies below the pool; None without lower tiers."""
        self.cache = cache
        self.states: dict[int, WatchedState] = {}  # by digest
        self._digester = digester
        self._pool, self._copies = cache.tree, copies if copies is not None else RadixTree(PagePool(0, 1))
        self._digests: dict[Node[Any], int] = {}  # by node with a state: the state's digest
        self._pool.changed, self._copies.changed = dict.fromkeys(self._pool.states), dict.fromkeys(self._copies.states)

    def look(self) -> set[int]:
        """Update `states` with the changes since the last call. Return the digests whose tier has changed."""
        before = dict[int, Tier | None]()
        for node, digest in self._changed(self._pool):
            before.setdefault(digest, self._tier(digest))
            self._entry(digest, node).in_pool = node in self._pool.states
        for copy, digest in self._changed(self._copies):
            before.setdefault(digest, self._tier(digest))
            present = copy in self._copies.states and not copy_of(copy).lost
            self._entry(digest, copy).below = copy_of(copy).tier if present else None
        for digest in before:
            if self._tier(digest) is None:
                self.states.pop(digest, None)
        return {digest for digest, tier in before.items() if tier != self._tier(digest)}

    def close(self) -> None:
        """Stop collecting changes."""
        self._pool.changed = self._copies.changed = None

    def _tier(self, digest: int) -> Tier | None:
        state = self.states.get(digest)
        return state.tier if state is not None else None

    def _entry(self, digest: int, node: Node[Any]) -> WatchedState:
        return self.states.setdefault(digest, WatchedState(node.end))

    def _changed(self, tree: RadixTree[Any]) -> Iterator[tuple[Node[Any], int]]:
        """Yield the next changed nodes of a tree, and the digests of their paths."""
        assert tree.changed is not None
        for node in list(islice(tree.changed, MOST_AT_ONCE)):
            del tree.changed[node]
            if node in tree.states:
                if node not in self._digests:
                    self._digests[node] = self._digest(node)
                yield node, self._digests[node]
            elif (digest := self._digests.pop(node, None)) is not None:
                yield node, digest  # Otherwise the state came and went between two calls.

    def _digest(self, node: Node[Any]) -> int:
        """Compute the digest of the tokens up to a node's end, from the next node above that has one."""
        above = list[Node[Any]]()
        for step in path_to_root(node):
            if step in self._digests or step.parent is None:
                break
            above.append(step)
        digest = self._digests[step] if step in self._digests else self._digester.beginning(step.salt)
        for step in reversed(above):
            digest = int(self._digester.extended(digest, step.start, step.tokens)[-1])
        return digest
