"""What is kept where: the orders in which states go, of the pool and of the copies below it, and which copies pay."""

from typing import Any, TypeVar

from baton.actors.cache.limits import NO_TIERS, TierLimits
from baton.actors.cache.radix import Clock, Node, RadixTree
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.cache.worth.chances import Chances
from baton.actors.cache.worth.order import PER_TOKEN, ByWorth, Costs, Order, Policy, above, whole_path
from baton.actors.cache.worth.prices import Prices

S = TypeVar("S")


class Ranking:
    """A part of the cache. clock: of both trees. unnamed: whether states without a session's name are copied."""

    def __init__(self, policy: Policy = "lru", costs: Costs = PER_TOKEN, limits: TierLimits = NO_TIERS) -> None:
        self.chances, self.prices, self.clock = Chances(), Prices(costs, limits), Clock()
        self.unnamed = True
        self._policy, self._costs = policy, costs

    def of_states(self, tree: RadixTree[S]) -> Order[S]:
        return ByAge() if self._policy == "lru" else ByWorth(tree, self.chances, self._costs)

    def of_copies(self, tree: RadixTree[S]) -> Order[S]:
        return ByAge() if self._policy == "lru" else ByWorth(tree, self.chances, self._costs, whole_path)

    def is_to_copy(self, node: Node[Any]) -> bool:
        """Whether a copy is made of a state that has to leave the pool."""
        return bool(node.sessions) or (self.unnamed and self._pays(node, in_host=True))

    def is_to_write(self, node: Node[Any]) -> bool:
        """Whether a copy that has to leave host memory goes to a file."""
        return bool(node.sessions) or self._pays(node, in_host=False)

    def is_to_bring(self, node: Node[Any], start: int, in_host: bool) -> bool:
        """Whether a copy is brought back for somebody who could compute on from `start`."""
        return self.prices.is_quicker(node.end, start, in_host)

    def age(self, node: Node[Any]) -> int:
        return self.clock.uses - node.used

    def _pays(self, node: Node[Any], in_host: bool) -> bool:
        chance = self.chances.chance(node.kind, self.age(node))
        return self.prices.pays(chance, node.end, above(node), in_host)
