"""Estimates of which copies are worth making, and the orders in which states and copies are evicted from each tier."""

from typing import Any, TypeVar

from baton.actors.cache.below.limits import NO_TIERS, TierLimits
from baton.actors.cache.below.prices import Prices
from baton.actors.cache.radix import Clock, Node, RadixTree
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.cache.worth.chances import Chances
from baton.actors.cache.worth.order import PER_TOKEN, ByWorth, Costs, Order, Policy, above, whole_path

S = TypeVar("S")


class Ranking:
    """The estimates that decide what is copied and evicted: chances of use, times to compute and copy, and age."""

    def __init__(
        self,
        policy: Policy = "lru",
        costs: Costs = PER_TOKEN,
        limits: TierLimits = NO_TIERS,
        clock: Clock | None = None,
    ) -> None:
        """clock: the clock of the pool's tree, which also measures the age of copies."""
        self.chances, self.prices, self.clock = Chances(), Prices(costs, limits), clock or Clock()
        self.unnamed = True  # whether states without a session's name are copied
        self._policy, self._costs = policy, costs

    def of_states(self, tree: RadixTree[S]) -> Order[S]:
        return ByAge() if self._policy == "lru" else ByWorth(tree, self.chances, self._costs)

    def of_copies(self, tree: RadixTree[S]) -> Order[S]:
        return ByAge() if self._policy == "lru" else ByWorth(tree, self.chances, self._costs, whole_path)

    def is_to_copy(self, node: Node[Any]) -> bool:
        """Return whether a state that leaves the pool is copied to host memory."""
        return bool(node.sessions) or (self.unnamed and self._pays(node, in_host=True))

    def is_to_write(self, node: Node[Any]) -> bool:
        """Return whether a copy that leaves host memory is written to a file."""
        return bool(node.sessions) or self._pays(node, in_host=False)

    def is_to_bring(self, node: Node[Any], start: int, in_host: bool) -> bool:
        """Return whether restoring a copy is faster than computing its tokens from `start`, or speeds are unknown."""
        return self.prices.is_quicker(node.end, start, in_host)

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Return how many seconds computing the tokens [start, end) takes; 0 if the device's speed is unknown."""
        return self.prices.computing(start, end)

    def age(self, node: Node[Any]) -> int:
        return self.clock.uses - node.used

    def _pays(self, node: Node[Any], in_host: bool) -> bool:
        chance = self.chances.chance(node.kind, self.age(node))
        return self.prices.pays(chance, node.end, above(node), in_host)
