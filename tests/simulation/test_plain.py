"""Seeds run with the core of the cache only: a plain eviction policy, and no tiers below the pool."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.actors.cache.below.limits import NO_TIERS
from baton.actors.cache.eviction import LeastRecentlyUsed
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.tiers import NoTiers
from baton.actors.lease import Lease, Ledger
from tests.actors.cache.plain import NoEviction
from tests.simulation import unit
from tests.simulation.driver import Simulation
from tests.simulation.scenario import Scenario, draw

SEEDS = 60


class ShownTiers(NoTiers):
    """NoTiers with the attributes that the simulation's checks read: no names, no copies, no commands."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.exports: dict[int, list[int]] = {}
        self.names = SimpleNamespace(in_pool={}, stored={}, opened={})
        self.store = SimpleNamespace(tree=RadixTree(parts[2].pages), leaving=())


def plain(policy: type[LeastRecentlyUsed]) -> Any:
    class ShownPolicy(policy):  # type: ignore[misc, valid-type]
        order = None

        def __init__(self, tree: RadixTree[Lease]) -> None:
            super().__init__(tree)
            self._ghosts: dict[Any, None] = {}

    def make_cache(send: Any, ledger: Ledger, pages: Any, *_: Any, kind: Any, max_tree_tokens: int, **__: Any) -> Any:
        tree: RadixTree[Lease] = RadixTree(pages)
        eviction = ShownPolicy(tree)
        return kind(send, ledger, tree, eviction, ShownTiers(send, ledger, tree, eviction), max_tree_tokens)

    return make_cache


def is_plain(scenario: Scenario) -> bool:
    return not scenario.talks and scenario.tiers == NO_TIERS


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, NoEviction])
def test_seeds_without_sessions_pass_with_a_plain_cache(
    policy: type[LeastRecentlyUsed], first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "make_cache", plain(policy))
    monkeypatch.setattr(unit, "watch_losses", lambda tiers: None)
    seeds = range(first_seed, first_seed + 3 * SEEDS)
    scenarios = [(seed, scenario) for seed in seeds if is_plain(scenario := draw(seed))]
    assert len(scenarios) > SEEDS // 2
    hits = evicted = 0
    for seed, scenario in scenarios[:SEEDS]:
        simulation = Simulation(scenario)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        hits += simulation.counters["prefix_cache_hits"]
        evicted += simulation.counters["evicted_states"]
    assert (hits > 0, evicted > 0) == (policy is LeastRecentlyUsed,) * 2
