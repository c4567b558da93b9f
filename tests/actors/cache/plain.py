"""Caches made of the core only: a plain eviction policy, and no tiers below the pool."""

from baton.actors.actor import Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.eviction import LeastRecentlyUsed, NoEviction
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.tiers import NoTiers
from baton.actors.lease import Lease, Ledger


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
