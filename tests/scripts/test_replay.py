"""Workloads in virtual time: savings of the policies, the upper bound, and reproducibility."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from baton.actors.tokens import pack
from scripts.replaying.bound import Past
from scripts.replaying.compare import Job, play_unlimited
from scripts.replaying.costs import Costs
from scripts.replaying.play import Outcome, make_ring, play
from scripts.replaying.policies import POLICIES
from scripts.replaying.workloads import WORKLOADS, Arrival, Workload, once
from tests.api.server_process import ROOT

REQUESTS = 240


def outcome(workload: str, policy: str, slots: int, past: Past | None = None) -> Outcome:
    return play(WORKLOADS[workload], make_ring(POLICIES[policy], slots, Costs()), REQUESTS, 1, past)


# Every third workload runs in CI, the others only with -m soak.
@pytest.mark.parametrize(
    "workload", [pytest.param(name, marks=[pytest.mark.soak] * bool(at % 3)) for at, name in enumerate(WORKLOADS)]
)
def test_every_workload_is_answered_and_no_policy_exceeds_the_bound(workload: str) -> None:
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


def test_the_outcome_depends_only_on_the_seed() -> None:
    first, second = (outcome("agents", "worth", 30) for _ in range(2))
    assert first == second


def test_nothing_is_evicted_without_limits() -> None:
    """Neither slots nor the size of the tree evict anything: the first prompt is found after 4 million prompt units."""
    size = (1 << 22) // 32

    def draw(rng: Random, requests: int) -> Iterator[Arrival]:
        for number in range(requests):
            yield Arrival(number * 1e4, once([number % 33 + 1] * size, 1))

    unlimited = play_unlimited(Job(Workload(draw), 34, 1), [])
    assert unlimited.outcome.cached >= size - 1 and not unlimited.outcome.counters["states_evicted:new"]


def test_worth_keeps_chats_that_take_turns() -> None:
    shares = {policy: outcome("chats in turns", policy, 128 + 8).reused for policy in POLICIES}
    assert shares["worth"] > 0.5 > shares["lru"] + 0.3


def test_the_bound_of_two_conversations_in_one_slot() -> None:
    """With one slot for two conversations that alternate, half of their repeated tokens can be reused."""
    past, chance = Past(), Random(1)
    talks = [b"", b""]
    for turn in range(40):
        prompt = talks[turn % 2] + pack([chance.getrandbits(30) for _ in range(10)])
        past.add("", prompt, b"")
        talks[turn % 2] = prompt
    known = sum(10 * (turn // 2) for turn in range(40)) / past.tokens
    assert past.bound(100) == pytest.approx(known, rel=1e-6)
    assert known / 2 <= past.bound(1) < 0.6 * known
    assert past.frontiers() == pytest.approx(2, rel=0.1)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "replay")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)


def test_the_table_is_the_same_from_any_number_of_processes(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 9, "hash_ids": [%d, %d]}\n'
    trace.write_text("".join(line % (at * 500, at % 3, at % 9) for at in range(60)))
    chosen = ["--workload", "agents", "tenants", "--requests", "60", "--size", "2", "0.5", "--trace", str(trace)]
    one, several = (run(*chosen, "--jobs", jobs) for jobs in ("1", "3"))
    assert (one.returncode, one.stderr) == (0, "") and one.stdout == several.stdout
    lines = one.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == ["agents", "tenants", str(trace)]
    assert len(lines) == 3 * (2 + 2 * (1 + len(POLICIES)))


def test_an_unreadable_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("{}\n")
    for name, why in (("trace", "line 1: neither"), ("absent", "No such file")):
        done = run("--trace", str(tmp_path / name))
        assert done.returncode == 1 and why in done.stderr and name in done.stderr and "Traceback" not in done.stderr
