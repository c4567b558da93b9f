"""One tenant's chats keep their cache hits while another tenant scans unique prompts: real actors, virtual time."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from scripts.replaying.bound import Past
from scripts.replaying.costs import Costs
from scripts.replaying.play import make_ring, play
from scripts.replaying.policies import POLICIES
from scripts.replaying.ring import Running
from scripts.replaying.workloads import Arrival, Client, Workload, chat, contexts, merged, text

NO_LIMIT = 1 << 30
UNLIMITED = 1 << 16


@dataclass(frozen=True)
class Tenants:
    """A workload of two tenants: one has users that chat, the other scans unique prompts."""

    users: int  # users of the tenant that chats
    talks: int  # conversations of each user
    turns: int  # turns of each conversation
    scan: int  # prompts of the tenant that scans

    def alone(self) -> Workload:
        return Workload(lambda rng, requests: self._chats(), self.users)

    def with_scan(self) -> Workload:
        return Workload(lambda rng, requests: merged(self._chats(), self._scan()), self.users)

    def _chats(self) -> Iterator[Arrival]:
        rng = Random(5)
        systems = [text(rng, 20, 80) for _ in range(5)]
        for index in range(self.users):
            yield Arrival(index * 20 / self.users, self._user(Random(rng.random()), systems))

    def _user(self, rng: Random, systems: list[list[int]]) -> Client:
        """Hold `talks` conversations, one after another."""
        for _ in range(self.talks):
            yield from chat(rng, rng.choice(systems), self.turns, lambda: rng.expovariate(1 / 20), "chats")

    def _scan(self) -> Iterator[Arrival]:
        """Send a prompt of about 5,000 tokens every 0.3 s, which keeps the device busy half of the time."""
        return contexts(Random(6), self.scan, 0.3, "scan")


@dataclass(frozen=True)
class Played:
    """The outcome of a replay."""

    share: float  # share of the chats' prompt tokens that were reused
    frontiers: float  # mean number of states that wait to be used
    most: int  # largest number of concurrent requests


def played(workload: Workload, policy: str = "worth", slots: int = UNLIMITED) -> Played:
    past, ring, most = Past(), make_ring(POLICIES[policy], slots, Costs()), 0
    submit = ring.submit

    def counted(running: Running) -> None:
        nonlocal most
        submit(running)
        most = max(most, len(ring.requests))

    ring.submit = counted  # type: ignore[method-assign]
    outcome = play(workload, ring, NO_LIMIT, 1, past if slots == UNLIMITED else None)
    return Played(outcome.by_salt["chats"] / outcome.prompt_by_salt["chats"], past.frontiers(), most)


def test_a_scan_takes_at_most_five_points_of_anothers_reuse() -> None:
    """A scan costs at most five points, given slots for the chats' waiting states and for all concurrent requests.

    This does not hold for a much shorter scan: the cache has not yet learned that new states are worth little.
    """
    tenants = Tenants(users=40, talks=4, turns=7, scan=2000)
    unlimited = played(tenants.alone())
    most = played(tenants.with_scan()).most
    alone = played(tenants.alone(), slots=round(unlimited.frontiers + unlimited.most))
    mixed = played(tenants.with_scan(), slots=round(unlimited.frontiers + most))
    assert alone.share - mixed.share <= 0.05 and mixed.share > 0.55


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["worth", "lru"])
@pytest.mark.parametrize("tenants", [Tenants(40, 2, 7, 1000), Tenants(80, 9, 14, 10_000)], ids=["1000", "10000"])
def test_scans_short_and_long(policy: str, tenants: Tenants) -> None:
    unlimited = played(tenants.alone())
    most = played(tenants.with_scan()).most
    own, both = (round(unlimited.frontiers + running) for running in (unlimited.most, most))
    alone, roomy = played(tenants.alone(), policy, own), played(tenants.alone(), policy, both)
    mixed = played(tenants.with_scan(), policy, both)
    print(
        f"{tenants.scan} prompts, {policy}: {alone.share:.1%} alone in {own} slots, {roomy.share:.1%} in {both}; "
        f"{mixed.share:.1%} with the scan in {both}"
    )
    assert mixed.share < roomy.share
    if policy == "worth" and tenants.scan == 10_000:
        assert alone.share - mixed.share <= 0.05
