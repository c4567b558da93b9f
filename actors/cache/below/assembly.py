"""The cache of the server: the cache actor with the server's eviction policy and tiers."""

from collections import Counter

from baton.actors.actor import Send
from baton.actors.cache.actor import MAX_TREE_TOKENS, WORTH_WAITING, Cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.imports import WORTH_ASKING
from baton.actors.cache.below.limits import NO_TIERS, TierLimits
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.worth.lives import Lives
from baton.actors.cache.worth.order import PER_TOKEN, Costs, Policy
from baton.actors.lease import Lease, Ledger
from baton.actors.storage.disk import Disk
from baton.actors.storage.peers import NoPeers, Peers


def make_cache(
    send: Send,
    ledger: Ledger,
    pages: PagePool,
    policy: Policy = "worth",
    costs: Costs = PER_TOKEN,
    limits: TierLimits = NO_TIERS,
    disk: Disk | None = None,
    peers: Peers | None = None,
    max_tree_tokens: int = MAX_TREE_TOKENS,
    worth_waiting: int = WORTH_WAITING,
    worth_asking: int = WORTH_ASKING,
    kind: type[Cache] = Cache,
) -> Cache:
    """Make a cache actor with the eviction policy and the tiers of the server.

    pages: the KV pages; their number is 0 if the model has no attention
    policy: "worth" evicts the states and copies that are worth least first, "lru" the least recently used ones
    costs: the costs of computing tokens and of storing states, from which "worth" is computed
    limits: sizes of the tiers; with NO_TIERS the tiers hold nothing
    disk: None if states are not written to files
    peers: None if there are no other engines
    worth_asking: a peer is asked for a state only if it saves more tokens
    kind: the class to make; tests pass a subclass
    """
    tree: RadixTree[Lease] = RadixTree(pages)
    counters: Counter[str] = Counter()
    ranking = Ranking(policy, costs, limits, tree.clock)
    lives = Lives(tree, ranking.chances, ranking.of_states(tree), counters)
    tiers = HostAndDisk(send, ledger, tree, lives, ranking, limits, disk, peers or NoPeers(), worth_asking)
    return kind(send, ledger, tree, lives, tiers, max_tree_tokens, worth_waiting, counters)
