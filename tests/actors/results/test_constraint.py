"""The constraint of a grammar combined with stop tokens: what it allows, and when it ends the output."""

import pytest

from baton.actors.grants import Proposal, RowMask
from baton.actors.messages import Admitted, Delta, Masked, Message, Requeue, Retired, Settled, Stepped
from baton.actors.requests import Hit, Output, Request, Sampling, Stops
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.constraint import Constraint, constrained_by
from baton.actors.results.drafters import draft
from baton.actors.tokens import pack
from baton.models.text.grammars.errors import ForbiddenToken, GrammarError
from tests.actors.results.test_results import Bench as ResultsBench
from tests.actors.ring import Letters

PROMPT = [1, 2, 3, 4]


class Words:
    """A matcher that allows one of several sequences of tokens below 32. Allowing token 31 makes `mask` raise."""

    def __init__(self, grammar: str) -> None:
        self.words = [list(map(int, word.split())) for word in grammar.split("|")]
        self.output: list[int] = []

    def consume(self, token: int) -> None:
        if token not in self.following():
            raise ForbiddenToken(f"{token} cannot follow")
        self.output.append(token)

    def fork(self) -> "Words":
        copy = Words("|".join(" ".join(map(str, word)) for word in self.words))
        copy.output = [*self.output]
        return copy

    def following(self) -> set[int]:
        at = len(self.output)
        return {word[at] for word in self.words if word[:at] == self.output and len(word) > at}

    def accepts(self) -> bool:
        return self.output in self.words

    def is_complete(self) -> bool:
        return not self.following()

    def mask(self) -> bytes:
        if 31 in self.following():
            raise GrammarError("too much")
        return words(*self.following())


def words(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(4, "little")


def constraint(grammar: str, *output: int, ends: tuple[int, ...] = (9,), min_tokens: int = 0) -> Constraint:
    return Constraint(Words(grammar), Stops(10, min_tokens, token_ids=ends), output)


def test_stop_tokens_are_allowed_where_the_grammar_may_end() -> None:
    assert constraint("5 6|5").words(0) == words(5)
    assert constraint("5 6|5", 5).words(1) == words(6, 9)
    assert constraint("5 6|5", 5, ends=()).words(1) == words(6)


def test_there_is_no_mask_where_the_grammar_must_end() -> None:
    assert constraint("5 6|5", 5, 6).words(2) is None
    assert constraint("").words(0) is None


def test_stop_tokens_are_not_allowed_before_min_tokens_unless_nothing_else_is() -> None:
    assert constraint("5 6|5 9|5", 5, min_tokens=3).words(1) == words(6)
    assert constraint("5 9", 5, min_tokens=3).words(1) == words(9)
    assert constraint("5", 5, min_tokens=3).words(1) is None


@pytest.mark.parametrize(
    ("tokens", "ahead"),
    [
        ([6, 7], [words(7), words(8, 9)]),
        ([6, 7, 8], [words(7), words(8, 9)]),  # nothing follows the 8
        ([6, 5, 7], [words(7)]),
        ([9, 6], []),  # a stop token belongs to no grammar
        ([4], []),  # what would follow is too much: the request has not failed
    ],
)
def test_masks_after_drafts_end_with_the_last_that_is_allowed(tokens: list[int], ahead: list[bytes]) -> None:
    before = constraint("5 6 7 8|5 6 7|5 4 31", 5)
    assert before.ahead(tokens, 1) == ahead
    assert before.words(1) == words(4, 6), "nothing was consumed"


def test_a_grammar_that_can_neither_continue_nor_end_is_an_error() -> None:
    class Silent(Words):
        def mask(self) -> bytes:
            return words()

    with pytest.raises(GrammarError, match="no token"):
        Constraint(Silent("5"), Stops(10), ()).words(0)


class Bench(ResultsBench):
    def __init__(self) -> None:
        super().__init__()
        self.results = ResultProcessor(
            lambda to, message: self.sent.append((to, message)), Letters(), constrained_by(Words)
        )

    def constrain(self, grammar: str, max_tokens: int = 10, grant: int = 1, output: tuple[int, ...] = ()) -> Request:
        tokens, stops = pack([*PROMPT, *output]), Stops(max_tokens, token_ids=(9,))
        request = Request("r", tokens, len(PROMPT), Sampling(), stops, grammar=grammar)
        self.results.receive(Admitted(grant, request, Hit()))
        self.results.act()
        return request

    def of(self, kind: type) -> list[Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def masked(self) -> Masked:
        message = self.of(Masked)[-1]
        assert isinstance(message, Masked)
        return message

    def end(self) -> Output:
        message = self.of(Delta)[-1]
        assert isinstance(message, Delta)
        return message.outputs[-1]


def test_a_mask_follows_the_admission_and_each_token() -> None:
    bench = Bench()
    bench.constrain("5 6 7|5 8")
    assert bench.masked() == Masked([RowMask(1, 4, words(5))], [])
    bench.step(5)
    assert bench.masked() == Masked([RowMask(1, 5, words(6, 8))], [])
    assert [type(message) for to, message in bench.sent if to == "scheduler"] == [Masked, Settled, Masked]


def test_an_output_ends_with_its_grammar() -> None:
    bench = Bench()
    bench.constrain("5 6", max_tokens=2)
    bench.step(5, 6)
    settled = bench.of(Settled)[-1]
    assert isinstance(settled, Settled) and settled.finished == [1]
    assert bench.end().finish_reason == "stop" and len(bench.of(Masked)) == 2


def test_an_output_with_nothing_to_draw_ends_before_its_first_token() -> None:
    bench = Bench()
    bench.constrain("|")
    assert bench.masked() == Masked([], [1]) and bench.end().finish_reason == "stop"
    bench.retire("finished", 4)
    assert not bench.results.records


@pytest.mark.parametrize(
    ("grammar", "token", "finish", "message"),
    [("5 31", 5, "grammar", "too much"), ("5 6", 7, "error", "7 cannot follow")],
    ids=["the grammar's own", "the server's"],
)
def test_an_error_ends_the_request_and_says_whose_it_is(grammar: str, token: int, finish: str, message: str) -> None:
    bench = Bench()
    bench.constrain(grammar)
    bench.step(token)
    assert bench.end().finish_reason == finish and bench.end().stop_reason == message
    bench.retire("finished", 4)
    assert not bench.results.records


def test_a_grammar_that_cannot_be_compiled_ends_its_request() -> None:
    bench = ResultsBench()
    request = Request("r", pack(PROMPT), len(PROMPT), Sampling(), Stops(3), grammar="anything")
    bench.results.receive(Admitted(1, request, Hit()))
    bench.results.act()
    [(_, masked), (_, delta)] = bench.sent
    assert masked == Masked([], [1]) and isinstance(delta, Delta) and delta.outputs[-1].finish_reason == "grammar"


def test_a_retracted_request_gets_its_mask_again() -> None:
    bench = Bench()
    bench.constrain("5 6 7")
    bench.step(5)
    bench.retire("retracted", 4)
    [requeue] = bench.of(Requeue)
    assert isinstance(requeue, Requeue)
    bench.results.receive(Admitted(2, requeue.request, Hit(4, 4)))
    bench.results.act()
    assert bench.masked() == Masked([RowMask(2, 5, words(6))], [])


def test_after_a_restart_the_grammar_continues_after_the_output() -> None:
    bench = Bench()
    bench.constrain("5 6 7", output=(5, 6))
    assert bench.masked() == Masked([RowMask(1, 6, words(7))], [])


def test_a_retired_row_gets_no_mask() -> None:
    bench = Bench()
    bench.constrain("5 6 7")
    before = len(bench.of(Masked))
    bench.results.receive(Stepped(1, [1], pack([5]), [], [], []))
    bench.results.receive(Retired(1, "aborted", bench.lease(), 4))
    bench.results.act()
    assert len(bench.of(Masked)) == before


def test_a_mask_comes_with_drafts_that_the_grammar_allows() -> None:
    bench = Bench()
    bench.results.draft = draft()
    bench.constrain("1 2 3 4|1 2 3 5")
    for token in (1, 2):
        bench.results.receive(Stepped(1, [1], pack([token]), [], [], [], propose=4))
        bench.results.act()
    proposal = Proposal(1, 6, pack([3]), 0.5)
    assert bench.masked() == Masked([RowMask(1, 6, words(3), [words(4, 5)], proposal)], [])
    settled = bench.of(Settled)[-1]
    assert isinstance(settled, Settled) and not settled.proposals, "a row with a grammar waits for its mask anyway"
