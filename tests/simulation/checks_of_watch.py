"""Checks of a router's knowledge: after any changes the watch knows exactly the states that are cached."""

from typing import Any

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.state_copy import StateCopy, copy_of
from baton.actors.cache.radix import Node, RadixTree, root_of, tokens_to
from baton.actors.runtime.digests import Digester
from baton.actors.runtime.watching import StateWatch

SELDOM = 16  # the watch looks after every so many deliveries, so that states come and go between two looks
DIGESTER = Digester()


class WatchChecks:
    """A watch of a cache, as routers have it, and what a router would know from its changes."""

    def __init__(self, cache: Cache, copies: RadixTree[StateCopy] | None) -> None:
        self._cache, self._copies = cache, copies
        self._watch = StateWatch(cache, copies, DIGESTER)
        self._routers: dict[int, str] = {}  # tier by digest, made of changes only
        self._deliveries = 0

    def check(self) -> None:
        """Let the watch look now and then. Called after every delivery to the cache."""
        self._deliveries += 1
        if self._deliveries % SELDOM:
            return
        for digest in self._watch.look():
            state = self._watch.states.get(digest)
            if state is None or state.tier is None:
                del self._routers[digest]  # it must have been there
            else:
                self._routers[digest] = state.tier
        expected = (
            {}
            if self._copies is None
            else {digest_of(node): copy_of(node).tier for node in self._copies.states if not copy_of(node).lost}
        )
        expected |= {digest_of(node): "slot" for node in self._cache.tree.states}
        assert self._routers == expected, "a router knows other states than there are"
        positions = {digest_of(node): node.end for node in self._cache.tree.states}
        assert all(self._watch.states[digest].position == end for digest, end in positions.items())


def digest_of(node: Node[Any]) -> int:
    """Compute the digest of a node's path at once."""
    return int(DIGESTER.extended(DIGESTER.beginning(root_of(node).salt), 0, tokens_to(node))[-1])
