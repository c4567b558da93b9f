"""Hints from clients: positions where they want states, ends that they will resume soon, and denied positions."""

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
    """Run a request whose client asks for checkpoints at `positions`; keep a state at each of them and at the end."""
    grant = bench.ask(tokens, **{"checkpoints": positions, **more})
    begin = bench.granted(grant).hit.cached_tokens
    bench.receive(Copied(grant))
    for position in positions:
        [slot] = bench.spares(grant, position, kind=Kind.ASKED)
        bench.receive(Donate(grant, slot, position, pack(tokens[begin:position]), closes=False))
        begin = position
    bench.receive(Donate(grant, bench.granted(grant).state, len(tokens), pack(tokens[begin:]), closes=True))


def test_a_state_that_a_client_wants_is_worth_more_than_any_other() -> None:
    """The kind ASKED ranks above all other kinds at every age, until the cache learns that such states stay unused."""
    chances = Chances()
    for age in (0, 20, 100, 400):
        index = chances.index(Kind.ASKED, age)
        assert all(index > chances.index(kind, age) for kind in Kind if kind is not Kind.ASKED)
    for _ in range(40 * LEARNED_AFTER):
        chances.learn(Kind.ASKED, 0, 500, used=False)
    assert chances.index(Kind.ASKED, 0) < chances.index(Kind.NEW, 0)


def test_an_end_that_is_resumed_soon_is_at_first_worth_as_much_as_a_session_s() -> None:
    chances = Chances()
    assert chances.index(Kind.SOON, 0) > chances.index(Kind.NAMED, 0) > chances.index(Kind.NEW, 0)
    assert chances.index(Kind.SOON, 400) < chances.index(Kind.NAMED, 400)


def test_a_state_that_was_asked_for_stays_of_that_kind_until_it_is_a_hub() -> None:
    bench = Bench(slots=32)
    checkpointed(bench, PROMPT, 20)
    assert node(bench, PROMPT[:20]).kind is Kind.ASKED
    for way in range(1, 5):
        bench.run([*PROMPT[:20], *[100 + way] * 5])
        assert node(bench, PROMPT[:20]).kind is (Kind.HUB if way == 4 else Kind.ASKED)
    bench.ledger.close()


def test_an_existing_state_becomes_one_that_was_asked_for() -> None:
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


def test_an_end_that_its_client_resumes_from_soon() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT[:20], keep="soon")
    assert node(bench, PROMPT[:20]).kind is Kind.SOON
    bench.run(PROMPT[:40])
    assert node(bench, PROMPT[:20]).kind is Kind.LAST_END, "its conversation has gone on"
    bench.run(PROMPT[:40], keep="soon")
    assert node(bench, PROMPT[:40]).kind is Kind.SOON, "it was a frontier, and its client will resume from it"
    bench.open("s")
    grant = bench.ask(PROMPT, session="s", keep="soon")
    bench.receive(Copied(grant))
    bench.receive(SaveFromReq(grant, "s", bench.granted(grant).state, 60, pack(PROMPT[40:])))
    assert node(bench, PROMPT).kind is Kind.NAMED


def test_the_state_that_was_asked_for_outlasts_one_that_saves_as_much() -> None:
    bench = Bench(slots=4)
    checkpointed(bench, PROMPT[:50], 49)
    bench.run([200] * 49)
    bench.run([300] * 49)
    bench.run([400] * 49)
    assert node(bench, PROMPT[:49]).kind is Kind.ASKED
    assert bench.counted["evicted_states"] == 1


def test_a_hint_is_no_pin() -> None:
    """A state that a client asked for is still evicted if nothing else can be."""
    bench = Bench(slots=2)
    checkpointed(bench, PROMPT[:50], 49)
    for token in (200, 300):
        bench.ask([token] * 10)
    assert bench.states == [] and bench.counted["evicted_states"] == 2
    bench.ledger.close()


# Positions where the client wanted a state and the cache kept none


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


def test_denials_are_split_with_their_node_and_forgotten_when_the_state_comes() -> None:
    bench = Bench(slots=32)
    bench.run(PROMPT, checkpoints=(20, 40))
    bench.run([*PROMPT[:30], 99])
    assert reason(bench, [*PROMPT[:20], 98]) == (0, "denied")
    assert reason(bench, [*PROMPT[:40], 98]) == (0, "denied")
    checkpointed(bench, [*PROMPT[:20], 97], 20)
    assert reason(bench, [*PROMPT[:20], 98]) == (20, "")
    assert reason(bench, [*PROMPT[:40], 98]) == (20, "denied"), "the other one is missing still"
    bench.ledger.close()


def test_a_state_that_was_kept_and_evicted_counts_as_evicted_not_denied() -> None:
    bench = Bench(slots=3)
    checkpointed(bench, PROMPT[:50], 30)
    first, second = (bench.ask([token] * 10) for token in (200, 300))
    third = bench.ask([400] * 10)
    assert bench.states == []
    for grant in (first, second, third):
        bench.receive(Free([bench.granted(grant).state], closes_grant=grant))
    assert reason(bench, [*PROMPT[:30], 99]) == (0, "evicted")
    bench.ledger.close()


def test_a_state_left_by_an_earlier_request_is_not_denied() -> None:
    """A position is not denied if the tree has a state there, whichever request left that state."""
    bench = Bench(slots=32)
    bench.run(PROMPT[:20])
    bench.run(PROMPT, checkpoints=(20,))
    assert node(bench, PROMPT).denied == frozenset() == node(bench, PROMPT[:20]).denied


@pytest.mark.parametrize("checkpoints", [(), (70,)])
def test_nothing_is_denied_beyond_the_tokens_that_the_tree_knows(checkpoints: tuple[int, ...]) -> None:
    """A request that ends during its prompt leaves only the tokens it has consumed.

    Later checkpoints are not denied.
    """
    bench = Bench(slots=32, pages=40)
    grant = bench.ask([*PROMPT, *PROMPT], checkpoints=checkpoints)
    bench.receive(Extend([grant]))
    bench.receive(Donate(grant, bench.granted(grant).state, 60, pack(PROMPT), closes=True))
    assert node(bench, PROMPT).denied == frozenset()
