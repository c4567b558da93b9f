"""Several engines with a router in virtual time: reuse compared with one engine that has all slots, and balance."""

import subprocess
import sys

import pytest

from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack
from scripts.replaying.choices import Thresholds
from scripts.replaying.clock import Clock
from scripts.replaying.costs import Costs
from scripts.replaying.engines import ALL, ONE, Line, play_rule
from scripts.replaying.play import make_ring
from scripts.replaying.policies import POLICIES
from scripts.replaying.sessions import Simulation
from tests.api.server_process import ROOT

ENGINES, SLOTS = 4, 16
SHORT, LONG = 800, 4000  # requests


def outcome(workload: str, rule: str, requests: int) -> Line:
    return play_rule(ENGINES, SLOTS, 1, requests, 1, workload, rule)


@pytest.mark.parametrize(
    ("workload", "requests", "least"),
    [
        ("chats in turns", SHORT, 0.9),
        *(
            pytest.param(name, LONG, least, marks=pytest.mark.soak)
            for name, least in (
                ("agents", 0.95),
                ("chats at random", 0.95),
                ("chats in turns", 0.95),
                ("pollution", 0.9),
            )
        ),
    ],
)
def test_four_engines_reuse_about_as_much_as_one(workload: str, requests: int, least: float) -> None:
    one, four = (outcome(workload, rule, requests) for rule in (ONE, "in seconds"))
    assert four.outcome.requests == one.outcome.requests and four.outcome.reused > least * one.outcome.reused
    assert four.imbalance < 1.3


def test_a_system_prompt_of_all_chats_does_not_put_them_on_one_engine() -> None:
    four = outcome("one system prompt", "in seconds", SHORT // 2)
    assert four.imbalance < 1.1 and four.outcome.reused > 0.9


@pytest.mark.soak
@pytest.mark.parametrize("workload", ALL)
def test_no_engine_has_much_more_to_do_than_the_others(workload: str) -> None:
    assert outcome(workload, "in seconds", LONG).imbalance < 1.3


def request(id: str, tokens: list[int]) -> Request:
    return Request(id, pack(tokens), len(tokens), Sampling(temperature=0.0), Stops(1))


def test_the_rule_with_thresholds() -> None:
    clock = Clock()
    rule = Thresholds([make_ring(POLICIES["worth"], 4, Costs(), clock=clock) for _ in range(2)])
    prompt = list(range(1, 101))
    first = rule.choose(request("a", prompt))
    assert rule.choose(request("b", prompt[:31] + [7] * 69)) == first  # more than 0.3 of it was sent there
    assert rule.choose(request("c", [8] * 50)) != first  # the other one has been sent less
    rule._loads[first] = rule.LOADS + 2
    assert rule.choose(request("d", prompt)) != first  # the loads differ too much


def test_very_many_sessions() -> None:
    simulation = Simulation(Clock(), engines=20, slots=64, seed=1)
    simulation.play(sessions=500, seconds=60.0)
    assert simulation.requests > 1000 and simulation.reused > 0.9 * simulation.of_one > 0
    assert simulation.imbalance < 1.5
    assert "20 engines" in simulation.shown()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["engines", "--workload", "agents", "--requests", "40", "--slots", "8"], 6),
        (["sessions", "--engines", "4", "--sessions", "40", "--seconds", "10"], 6),
    ],
)
def test_the_commands(arguments: list[str], lines: int) -> None:
    script = str(ROOT / "scripts" / "replay")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.splitlines()) == lines
