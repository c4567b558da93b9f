"""Workloads in virtual time: what the policies save, what nobody can exceed, and that a seed says it all."""

from random import Random

import pytest

from actors.tokens import pack
from scripts.replaying.bound import Past
from scripts.replaying.costs import Costs
from scripts.replaying.play import Outcome, make_ring, play
from scripts.replaying.policies import POLICIES
from scripts.replaying.workloads import WORKLOADS

REQUESTS = 400


def outcome(workload: str, policy: str, slots: int, past: Past | None = None) -> Outcome:
    return play(WORKLOADS[workload], make_ring(POLICIES[policy], slots, Costs()), REQUESTS, 1, past)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_answered_whole_and_nobody_exceeds_the_bound(workload: str) -> None:
    past = Past()
    unlimited = outcome(workload, "worth", 1 << 16, past)
    assert unlimited.requests >= REQUESTS // 2 and unlimited.reused <= past.bound(1 << 16) + 1e-9
    slots = max(4, round(past.frontiers() / 2))
    bound = past.bound(slots)
    for policy in POLICIES:
        limited = outcome(workload, policy, slots)
        assert limited.requests == unlimited.requests and limited.prompt == pytest.approx(unlimited.prompt, rel=0.05)
        assert limited.cached + limited.computed >= limited.prompt
        assert limited.reused <= bound + 0.02, f"{policy}: the order of requests differs a little from the bound's"


def test_a_seed_says_it_all() -> None:
    first, second = (outcome("agents", "worth", 30) for _ in range(2))
    assert first == second


def test_chats_that_take_turns_are_found_again() -> None:
    shares = {policy: outcome("chats in turns", policy, 128 + 8).reused for policy in POLICIES}
    assert shares["worth"] > 0.5 > shares["lru"] + 0.3


def test_the_bound_of_two_conversations_in_one_slot() -> None:
    """They take turns, and one of them can be kept: of what they ask again, half can be reused."""
    past, chance = Past(), Random(1)
    talks = [b"", b""]
    for turn in range(40):
        asked = talks[turn % 2] + pack([chance.getrandbits(30) for _ in range(10)])
        past.add("", asked, b"")
        talks[turn % 2] = asked
    known = sum(10 * (turn // 2) for turn in range(40)) / past.tokens
    assert past.bound(100) == pytest.approx(known, rel=1e-6)
    assert known / 2 <= past.bound(1) < 0.6 * known
    assert past.frontiers() == pytest.approx(2, rel=0.1)
