"""The worth of a state: the chance that it is used, learned from earlier states, times what it saves, over its size."""

import random
import time
from math import exp
from statistics import median, quantiles

import pytest

from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.cache.worth.chances import BEGINS, LEARNED_AFTER, PRIORS, STEPS, Chances, prospects, step_of
from baton.actors.cache.worth.order import ByWorth, Costs
from baton.actors.kinds import Kind
from baton.actors.tokens import pack


def test_each_age_falls_into_its_step() -> None:
    for step in range(STEPS - 1):
        assert {step_of(BEGINS[step]), step_of(BEGINS[step + 1] - 1)} == {step}
    assert step_of(1 << 40) == STEPS - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_the_best_ratio_over_all_times_to_stop(seed: int) -> None:
    """Compare the index with a search that tries every stopping time."""
    chance = random.Random(seed)
    risks = [chance.choice([0.0, 10 ** -chance.uniform(0, 5)]) for _ in range(STEPS)]
    indices, chances = prospects(risks)
    for start in range(16):
        alive, time, best = 1.0, 0.0, 0.0
        for age in range(BEGINS[start], BEGINS[26]):
            risk = risks[step_of(age)]
            time += alive * ((1 - exp(-risk)) / risk if risk else 1)
            alive *= exp(-risk)
            best = max(best, (1 - alive) / time)
        assert best * 0.999 <= indices[start] <= max(best, *risks[26:]) * 1.001
        if not any(risks[26:]):
            assert indices[start] == pytest.approx(best, rel=2e-3)
        assert 1 - alive <= chances[start] + 1e-9


def test_before_anything_is_learned_only_hubs_are_worth_more_than_continued_conversations() -> None:
    chances = Chances()
    new = {kind: chances.index(kind, 0) for kind in Kind}
    assert new[Kind.HUB] > new[Kind.FRONTIER] > new[Kind.NEW] > new[Kind.LAST_END] > new[Kind.INTERIOR]
    assert new[Kind.NEW] > 3 * new[Kind.CHECKPOINT], "a state seen once does not evict a proven one"
    for kind in Kind:
        assert chances.chance(kind, 0) == pytest.approx(PRIORS[kind].share, abs=0.15)


def test_states_used_in_turns_gain_worth_while_they_wait() -> None:
    """A hundred states are resumed round-robin, so the most recently used state is needed last."""
    chances = Chances()
    for _ in range(20 * LEARNED_AFTER):
        chances.learn(Kind.FRONTIER, 0, 100, used=True)
    young, middle, old = (chances.index(Kind.FRONTIER, age) for age in (0, 50, 94))
    assert young < middle < old


def test_an_order_whose_least_is_never_asked_for_forgets_states_that_have_gone() -> None:
    tree = RadixTree[int](PagePool(0, 1))
    order = ByWorth(tree, Chances(), Costs())
    for number in range(2_000):
        node = tree.insert(tree.match("", b"", 0).node, pack([number, 1]), [])
        tree.set_state(node, number)
        order.put(node, True)
        tree.take_state(node)
        order.put(node, False)
        tree.remove(node)
    assert len(order._heap) < 200


def test_the_index_of_a_kind_that_is_never_used_falls_to_nothing() -> None:
    chances = Chances()
    before = chances.index(Kind.NEW, 0)
    for _ in range(20 * LEARNED_AFTER):
        chances.learn(Kind.NEW, 0, 500, used=False)
    assert chances.index(Kind.NEW, 0) < before / 20 and chances.chance(Kind.NEW, 0) < 0.1
    assert chances.index(Kind.FRONTIER, 0) == Chances().index(Kind.FRONTIER, 0), "that is another kind"


def test_recent_observations_weigh_more_than_older_ones() -> None:
    chances = Chances()
    for used in (True, False):
        for _ in range(200 * LEARNED_AFTER):
            chances.learn(Kind.LAST_END, 0, 10, used)
    assert chances.chance(Kind.LAST_END, 0) < 0.3


class Grove:
    """A tree without pages, and its states ordered by worth (ByWorth)."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.tree: RadixTree[str] = RadixTree(PagePool(0, 1))
        self.order: ByWorth[str] = ByWorth(self.tree, Chances(), costs or Costs())

    def add(self, tokens: list[int], kind: Kind) -> Node[str]:
        node = self.tree.insert(self.tree.match("", b"", 0).node, pack(tokens), [])
        node.kind = kind
        self.tree.set_state(node, "state")
        self.order.put(node, True)
        return node

    def least(self, *spared: Node[str]) -> Node[str] | None:
        return self.order.least(lambda node: node not in spared)

    def check(self) -> None:
        """Check that each state is in exactly one queue of the order."""
        queues = vars(self.order)["_queues"]
        assert sum(map(len, queues.values())) == len(self.tree.states) and all(queues.values())


def test_the_least_likely_goes_first_of_states_that_save_as_much() -> None:
    grove = Grove()
    frontier, interior = grove.add([1] * 50, Kind.FRONTIER), grove.add([2] * 50, Kind.INTERIOR)
    assert grove.least() is interior and grove.least(interior) is frontier and grove.least(interior, frontier) is None


def test_the_state_that_saves_least_goes_first_of_one_kind() -> None:
    grove = Grove()
    long, short = grove.add([1] * 900, Kind.NEW), grove.add([2] * 9, Kind.NEW)
    assert grove.least() is short and grove.least(short) is long


def test_a_state_saves_the_tokens_after_the_state_above_it_and_more_when_that_goes() -> None:
    grove = Grove()
    upper, lower, other = grove.add([1] * 900, Kind.FRONTIER), grove.add([1] * 910, Kind.FRONTIER), None
    other = grove.add([2] * 100, Kind.FRONTIER)
    assert grove.least() is lower
    grove.tree.take_state(upper)
    grove.order.put(upper, False)
    assert grove.least() is other, "it would be 910 tokens to compute now"
    grove.check()
    upper.kind = Kind.FRONTIER
    grove.tree.set_state(upper, "state")
    grove.order.put(upper, True)
    assert grove.least() is lower
    grove.check()


def test_attention_makes_deep_states_worth_more() -> None:
    near, far = [1] * 100, [2] * 1000
    for attend, deeper in ((0.0, False), (0.1, True)):
        grove = Grove(Costs(attend=attend))
        grove.add(far, Kind.HUB)
        shallow, deep = grove.add(near, Kind.NEW), grove.add([*far, *[3] * 90], Kind.NEW)
        assert grove.order.worth(deep) > grove.order.worth(shallow) if deeper else grove.least() is deep


def test_pages_that_a_state_alone_holds_count_against_it() -> None:
    grove = Grove(Costs(slot=100, token=10))
    leaf, inner = grove.add([1] * 100, Kind.NEW), grove.add([2] * 100, Kind.NEW)
    assert grove.order.worth(leaf) == pytest.approx(grove.order.worth(inner), rel=0.05)
    grove.add([*[2] * 100, 3], Kind.NEW)
    assert grove.order.worth(inner) > 5 * grove.order.worth(leaf)


def test_a_checkpoint_is_admitted_for_what_it_is_expected_to_save() -> None:
    grove = Grove()
    cached = grove.add([1] * 100, Kind.FRONTIER)
    assert not grove.order.admits(Kind.CHECKPOINT, 0, 100, cached)
    assert grove.order.admits(Kind.CHECKPOINT, 0, 10_000, cached)
    assert not grove.order.admits(Kind.CHECKPOINT, 9_900, 10_000, cached), "there is another shortly before"
    assert ByAge[str]().admits(Kind.CHECKPOINT, 0, 1, cached)


def test_the_order_looks_at_few_of_ten_thousand_states(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, grove = random.Random(1), Grove()
    for number in range(10_000):
        grove.add([number % 97, *[number] * chance.randint(1, 3000)], chance.choice(list(Kind)))
    looked_at = 0
    worth = grove.order.worth

    def counted(node: Node[str]) -> float:
        nonlocal looked_at
        looked_at += 1
        return worth(node)

    monkeypatch.setattr(grove.order, "worth", counted)
    for token in range(1000):
        gone = grove.least()
        assert gone is not None
        grove.tree.take_state(gone)
        grove.order.put(gone, False)
        grove.add([5, token, *[7] * chance.randint(1, 3000)], chance.choice(list(Kind)))
    assert looked_at < 1000 * 10
    grove.check()


def seconds_to_choose(states: int) -> float:
    """Return the processor time of one choice among so many states, in the mean of 2,000 choices."""
    grove, chance = Grove(), random.Random(3)
    for number in range(states):
        grove.add([number % 97, *[number] * chance.randint(1, 3000)], chance.choice(list(Kind)))
    grove.least()
    seconds = 0.0
    for token in range(2000):
        began = time.thread_time()
        gone = grove.least()
        seconds += time.thread_time() - began
        assert gone is not None
        grove.tree.take_state(gone)
        grove.order.put(gone, False)
        grove.add([5, token, *[7] * chance.randint(1, 3000)], chance.choice(list(Kind)))
    return seconds / 2000


@pytest.mark.soak
def test_a_choice_among_ten_thousand_states_takes_little_longer_than_among_a_hundred() -> None:
    few, many = (min(seconds_to_choose(states) for _ in range(3)) for states in (100, 10_000))
    print(f"{1e6 * few:.1f} µs among 100 states, {1e6 * many:.1f} among 10,000")
    assert many < 10 * few


@pytest.mark.parametrize("seed", range(5))
def test_the_state_returned_is_about_the_least_whatever_has_happened(seed: int) -> None:
    """The returned state may be worth more than the least: only the ends of queues are compared."""
    chance, grove, nodes = random.Random(seed), Grove(), list[Node[str]]()
    over: list[float] = []
    for _ in range(3000):
        if len(nodes) < 100 or chance.random() < 0.5:
            path = [chance.randrange(3) for _ in range(chance.randint(1, 6))]
            node = grove.add([token for token in path for _ in range(20)] + [9] * chance.randint(1, 300), Kind.NEW)
            nodes += [node] * (node not in nodes)
        used = chance.choice(nodes)
        used.kind = chance.choice(list(Kind))
        grove.tree.touch(used)
        grove.order.put(used, True)
        if len(nodes) > 150:
            gone = grove.least()
            assert gone is not None
            over.append(grove.order.worth(gone) / min(map(grove.order.worth, nodes)))
            nodes.remove(gone)
            grove.tree.take_state(gone)
            grove.order.put(gone, False)
        grove.check()
    assert len(over) > 1000 and median(over) < 1.5 and quantiles(over, n=20)[-1] < 5, quantiles(over, n=20)
