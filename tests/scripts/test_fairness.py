"""A tenant's chats keep what they reuse while another scans unique prompts: the real actors, in virtual time."""

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
    """users: of the one who chats, each of whom has so many talks of so many turns. scan: prompts of the other."""

    users: int
    talks: int
    turns: int
    scan: int

    def alone(self) -> Workload:
        return Workload(lambda rng, requests: self._chats(), self.users)

    def beside(self) -> Workload:
        return Workload(lambda rng, requests: merged(self._chats(), self._scan()), self.users)

    def _chats(self) -> Iterator[Arrival]:
        rng = Random(5)
        systems = [text(rng, 20, 80) for _ in range(5)]
        for index in range(self.users):
            yield Arrival(index * 20 / self.users, self._user(Random(rng.random()), systems))

    def _user(self, rng: Random, systems: list[list[int]]) -> Client:
        """One conversation after the other."""
        for _ in range(self.talks):
            yield from chat(rng, rng.choice(systems), self.turns, lambda: rng.expovariate(1 / 20), "chats")

    def _scan(self) -> Iterator[Arrival]:
        """A prompt of 5,000 tokens each 0.3 s, which keeps the device busy for half of the time."""
        return contexts(Random(6), self.scan, 0.3, "scan")


@dataclass(frozen=True)
class Played:
    """share: of the chats' prompt tokens that were reused. frontiers: states that wait. most: requests at once."""

    share: float
    frontiers: float
    most: int


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
    """In each case slots for the chats' frontiers and for what runs at once.

    Of a scan that is much shorter it does not hold: what is new has not been learned to be worth little by then.
    """
    tenants = Tenants(users=40, talks=4, turns=7, scan=2000)
    unlimited = played(tenants.alone())
    most = played(tenants.beside()).most
    alone = played(tenants.alone(), slots=round(unlimited.frontiers + unlimited.most))
    beside = played(tenants.beside(), slots=round(unlimited.frontiers + most))
    assert alone.share - beside.share <= 0.05 and beside.share > 0.55


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["worth", "lru"])
@pytest.mark.parametrize("tenants", [Tenants(40, 2, 7, 1000), Tenants(80, 9, 14, 10_000)], ids=["1000", "10000"])
def test_scans_short_and_long(policy: str, tenants: Tenants) -> None:
    unlimited = played(tenants.alone())
    most = played(tenants.beside()).most
    own, both = (round(unlimited.frontiers + running) for running in (unlimited.most, most))
    alone, roomy = played(tenants.alone(), policy, own), played(tenants.alone(), policy, both)
    beside = played(tenants.beside(), policy, both)
    print(
        f"{tenants.scan} prompts, {policy}: {alone.share:.1%} alone in {own} slots, {roomy.share:.1%} in {both}; "
        f"{beside.share:.1%} beside the scan in {both}"
    )
    assert beside.share < roomy.share
    if policy == "worth" and tenants.scan == 10_000:
        assert alone.share - beside.share <= 0.05
