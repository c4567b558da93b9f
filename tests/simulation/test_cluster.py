"""Random schedules of several engines with links between them; every state that crosses a link is checked."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.simulation import mutations_of_peers
from tests.simulation.cluster import Cluster
from tests.simulation.mutations import is_out_of_date
from tests.simulation.planting import planting
from tests.simulation.shrink import failure_of

# The first seed that finds each planted bug. After a change to what seeds draw, search again with `first_failure`.
FOUND_BY = {
    "used_before_released": 132,
    "loans_outlive_the_connection": 0,
    "ticket_of_an_old_connection_accepted": 28,
    "released_for_a_loan_that_had_ended": 132,
    "partial_copy_used_without_the_pages_above": 1573,
    "acquire_not_woken_when_the_link_ends": 0,
    "loan_to_a_peer_ended_twice": 0,
    "engines_wait_in_a_circle": 65,
}
NARROW = {"engines_wait_in_a_circle"}  # found sooner by engines with one row each
FOUND_ELSEWHERE = {"landing_buffer_reused_before_the_fence"}  # by tests/actors/peers/test_link.py

# Seeds that failed before a bug was fixed.
FAILED_ONCE = [
    9,  # the cache lent a state whose Unlend was on its way
    85,  # a copy from a peer stayed after the drain
    899710389,  # a copy from a peer was dropped twice: its read failed while the engine drained
    899710990,  # a link was cut, the engine restarted, and only then the old cache's read failed, in the new cache
    1068,  # two engines waited for each other's computations, with all rows taken by requests that waited
]


def run(seeds: Iterable[int], may_draft: bool = True, is_narrow: bool = False) -> Counter[str]:
    """Run the seeds. may_draft: False for seeds that were found before rows could feed drafts."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        cluster = Cluster(seed, may_draft=may_draft, is_narrow=is_narrow)
        try:
            cluster.run()
        except Exception as error:
            error.add_note(f"cluster seed {seed}")
            raise
        reached += cluster.counters
    return reached


def test_fresh_clusters(first_seed: int) -> None:
    run(range(first_seed, first_seed + 30))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_many_clusters(first_seed: int, part: int) -> None:
    run(range(first_seed + 100 * part, first_seed + 100 * (part + 1)))


def test_clusters_that_failed_once() -> None:
    run(FAILED_ONCE, may_draft=False)


def test_every_outcome_is_reached() -> None:
    reached = run(range(30))
    outcomes = ("asked", "imported", "failed", "declined", "cancelled", "lent", "refused")
    expected = {
        *(f"peer {outcome}" for outcome in outcomes),
        "cut",
        "engine died",
        "fenced with pulls",
        "fetched",
        "given",
    }
    assert expected <= reached.keys(), expected - reached.keys()
    assert reached["goes on from peer"] >= 10


def test_every_planted_bug_is_listed() -> None:
    planted = {
        name
        for name, value in vars(mutations_of_peers).items()
        if getattr(value, "__module__", "") == mutations_of_peers.__name__
    }
    assert planted == FOUND_BY.keys() | FOUND_ELSEWHERE


@pytest.mark.parametrize("name", FOUND_BY)
def test_the_simulation_finds(name: str) -> None:
    """Each planted bug is found by its seed, with which the right code passes."""
    of_seed: dict[str, Any] = {"seeds": [FOUND_BY[name]], "may_draft": name in NARROW, "is_narrow": name in NARROW}
    run(**of_seed)
    with planting(getattr(mutations_of_peers, name)), pytest.raises(Exception) as raised:  # any check may notice it
        run(**of_seed)
    found = failure_of(raised.value, 0)
    assert not is_out_of_date(found), f"the mutation is out of date: {found}"
