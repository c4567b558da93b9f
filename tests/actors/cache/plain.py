"""Caches made of the core only: a plain eviction policy, and no tiers below the pool."""

from collections.abc import Callable

from baton.actors.actor import Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.eviction import LeastRecentlyUsed, any_node
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree
from baton.actors.cache.tiers import NoTiers
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger


class NoEviction(LeastRecentlyUsed):
    """The policy that caches nothing: donated states are freed at once, and every prompt is computed as a whole.

    A policy that cached states but never evicted them would lose one slot after another, until no request could run.
    Without cached states every slot is free again when its request ends. So a request that finds no free slot only
    waits for running requests.
    """

    def keeps(self, node: Node[Lease], kind: Kind) -> bool:
        return False

    def next_to_evict(self, may_go: Callable[[Node[Lease]], bool] = any_node) -> Node[Lease] | None:
        return None

    def admits(self, kind: Kind, start: int, end: int, instead: Node[Lease]) -> bool:
        return False


def lru_cache(send: Send, ledger: Ledger, pages: PagePool) -> Cache:
    return plain_cache(send, ledger, pages, LeastRecentlyUsed)


def cache_without_eviction(send: Send, ledger: Ledger, pages: PagePool) -> Cache:
    return plain_cache(send, ledger, pages, NoEviction)


def plain_cache(
    send: Send, ledger: Ledger, pages: PagePool, policy: type[LeastRecentlyUsed], kind: type[Cache] = Cache
) -> Cache:
    tree: RadixTree[Lease] = RadixTree(pages)
    eviction = policy(tree)
    return kind(send, ledger, tree, eviction, NoTiers(send, ledger, tree, eviction))
