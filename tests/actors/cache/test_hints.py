"""What clients say of states: positions that they ask for, ends that they come back to soon, and what was not kept."""

import pytest

from baton.actors.cache.radix import Node
from baton.actors.cache.worth.chances import LEARNED_AFTER, Chances
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.messages import Copied, Donate, Extend, Free, SaveFromReq
from baton.actors.tokens import pack
from tests.actors.cache.bench import Bench

PROMPT = list(range(60))


def node(bench: Bench, tokens: list[int]) -> Node[Lease]:
    found = bench.cache.tree.deepest("", pack(tokens), len(tokens))
    assert found is not None and found.end == len(tokens), f"there is no state behind {len(tokens)} tokens"
    return found


def checkpointed(bench: Bench, tokens: list[int], *positions: int, **more: object) -> None:
    """A request that keeps its states at these positions, each of which its client has asked for, and at its end."""
    grant = bench.ask(tokens, **{"checkpoints": positions, **more})
    begin = bench.granted(grant).hit.cached_tokens
    bench.receive(Copied(grant))
    for position in positions:
        [slot] = bench.spares(grant, position, kind=Kind.ASKED)
        bench.receive(Donate(grant, slot, position, pack(tokens[begin:position]), closes=False))
        begin = position
    bench.receive(Donate(grant, bench.granted(grant).state, len(tokens), pack(tokens[begin:]), closes=True))


def test_what_a_client_asks_for_is_worth_more_than_what_is_kept_without() -> None:
    """At any age, until it is learned that nobody comes for what they ask for; then it is like any other."""
    chances = Chances()
    for age in (0, 20, 100, 400):
        asked = chances.index(Kind.ASKED, age)
        assert all(asked > chances.index(kind, age) for kind in Kind if kind is not Kind.ASKED)
    for _ in range(40 * LEARNED_AFTER):
        chances.learn(Kind.ASKED, 0, 500, used=False)
    assert chances.index(Kind.ASKED, 0) < chances.index(Kind.NEW, 0)


def test_what_is_gone_on_from_soon_is_worth_as_much_as_a_session_s_for_a_time() -> None:
    chances = Chances()
    assert chances.index(Kind.SOON, 0) > chances.index(Kind.NAMED, 0) > chances.index(Kind.NEW, 0)
    assert chances.index(Kind.SOON, 400) < chances.index(Kind.NAMED, 400)


def test_a_state_that_is_asked_for_stays_so_until_many_go_on_from_it() -> None:
    bench = Bench(slots=32)
    checkpointed(bench, PROMPT, 20)
    assert node(bench, PROMPT[:20]).kind is Kind.ASKED
    for way in range(1, 5):
        bench.run([*PROMPT[:20], *[100 + way] * 5])
        assert node(bench, PROMPT[:20]).kind is (Kind.HUB if way == 4 else Kind.ASKED)
    bench.ledger.close()


def test_a_state_that_is_there_already_is_what_the_client_asks_for() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT[:20])
    bench.run(PROMPT[:40])
    assert [node(bench, PROMPT[:20]).kind, node(bench, PROMPT[:40]).kind] == [Kind.LAST_END, Kind.FRONTIER]
    bench.ask(PROMPT, checkpoints=(20, 40))
    assert [node(bench, PROMPT[:20]).kind, node(bench, PROMPT[:40]).kind] == [Kind.ASKED, Kind.ASKED]
    bench.ledger.close()


def test_a_session_s_state_keeps_its_name() -> None:
    bench = Bench(slots=32)
    bench.open("s")
    bench.run(PROMPT[:20], session="s")
    bench.ask(PROMPT, checkpoints=(20,))
    assert node(bench, PROMPT[:20]).kind is Kind.NAMED
    bench.ledger.close()


def test_the_end_that_a_client_comes_back_to_soon() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT[:20], keep="soon")
    assert node(bench, PROMPT[:20]).kind is Kind.SOON
    bench.run(PROMPT[:40])
    assert node(bench, PROMPT[:20]).kind is Kind.LAST_END, "its conversation has gone on"
    bench.run(PROMPT[:40], keep="soon")
    assert node(bench, PROMPT[:40]).kind is Kind.SOON, "it was a frontier, and is one to which somebody comes back"
    bench.open("s")
    grant = bench.ask(PROMPT, session="s", keep="soon")
    bench.receive(Copied(grant))
    bench.receive(SaveFromReq(grant, "s", bench.granted(grant).state, 60, pack(PROMPT[40:])))
    assert node(bench, PROMPT).kind is Kind.NAMED


def test_of_two_that_save_as_much_the_one_that_was_asked_for_stays() -> None:
    bench = Bench(slots=4)
    checkpointed(bench, PROMPT[:50], 49)
    bench.run([200] * 49)
    bench.run([300] * 49)
    bench.run([400] * 49)
    assert node(bench, PROMPT[:49]).kind is Kind.ASKED
    assert bench.counted["evicted_states"] == 1


def test_it_is_no_pin() -> None:
    """Where there is nothing else, it goes."""
    bench = Bench(slots=2)
    checkpointed(bench, PROMPT[:50], 49)
    for token in (200, 300):
        bench.ask([token] * 10)
    assert bench.states == [] and bench.counted["evicted_states"] == 2
    bench.ledger.close()


# What is said of those that were not kept


def reason(bench: Bench, tokens: list[int]) -> tuple[int, str]:
    granted = bench.granted(bench.ask(tokens))
    return granted.hit.cached_tokens, granted.hit.miss_reason


def test_a_checkpoint_for_which_there_was_no_slot_is_denied() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT, checkpoints=(20, 30))
    assert reason(bench, [*PROMPT[:20], 99]) == (0, "denied")
    assert reason(bench, [*PROMPT[:35], 99]) == (0, "denied")
    assert reason(bench, [*PROMPT[:19], 99]) == (0, "misaligned"), "it would not have been of use"
    assert reason(bench, [*PROMPT, 99]) == (60, ""), "there is a deeper one"
    bench.ledger.close()


def test_what_was_denied_is_known_on_both_sides_of_a_split_and_forgotten_when_it_comes() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT, checkpoints=(20, 40))
    bench.run([*PROMPT[:30], 99])
    assert reason(bench, [*PROMPT[:20], 98]) == (0, "denied")
    assert reason(bench, [*PROMPT[:40], 98]) == (0, "denied")
    checkpointed(bench, [*PROMPT[:20], 97], 20)
    assert reason(bench, [*PROMPT[:20], 98]) == (20, "")
    assert reason(bench, [*PROMPT[:40], 98]) == (20, "denied"), "the other one is missing still"
    bench.ledger.close()


def test_what_was_kept_and_had_to_go_was_evicted() -> None:
    bench = Bench(slots=3)
    checkpointed(bench, PROMPT[:50], 30)
    first, second = (bench.ask([token] * 10) for token in (200, 300))
    third = bench.ask([400] * 10)
    assert bench.states == []
    for grant in (first, second, third):
        bench.receive(Free([bench.granted(grant).state], closes_grant=grant))
    assert reason(bench, [*PROMPT[:30], 99]) == (0, "evicted")
    bench.ledger.close()


def test_what_a_request_before_left_denies_nothing() -> None:
    """The tree has a state there, whoever has left it."""
    bench = Bench(slots=32)
    bench.run(PROMPT[:20])
    bench.run(PROMPT, checkpoints=(20,))
    assert node(bench, PROMPT).denied == frozenset() == node(bench, PROMPT[:20]).denied


@pytest.mark.parametrize("checkpoints", [(), (70,)])
def test_beyond_what_the_tree_knows_nothing_is_denied(checkpoints: tuple[int, ...]) -> None:
    """A request that was given up in its prompt leaves what it has read."""
    bench = Bench(slots=32, pages=40)
    grant = bench.ask([*PROMPT, *PROMPT], checkpoints=checkpoints)
    bench.receive(Extend([grant]))
    bench.receive(Donate(grant, bench.granted(grant).state, 60, pack(PROMPT), closes=True))
    assert node(bench, PROMPT).denied == frozenset()
