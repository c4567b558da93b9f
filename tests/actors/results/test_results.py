"""The result-processor without the other actors: when requests finish, what happens to states, what clients get."""

from collections.abc import Iterator

import pytest

from baton.actors.grants import Advance, Chunk, Proposal, RowDrafts
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import (
    Admitted,
    Checkpoint,
    Delta,
    Donate,
    Ended,
    Failure,
    Free,
    Message,
    Over,
    Requeue,
    Retired,
    SaveFromReq,
    Settled,
    Stepped,
)
from baton.actors.requests import Hit, Output, Request, RetireReason, RowLogprobs, Sampling, Stops, TokenLogprob
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.drafters import draft
from baton.actors.tokens import pack, unpack
from tests.actors.ring import Letters

PROMPT = [1, 2, 3, 4]


class Bench:
    """A result-processor, and a list of the messages that it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.ledger = Ledger(8)
        self.results = ResultProcessor(lambda to, message: self.sent.append((to, message)), Letters())
        self._steps = 0

    def admit(self, stops: Stops, grant: int = 1, match: int = 0, origin: str = "tokens", **more: object) -> Request:
        request = Request("r", pack(PROMPT), len(PROMPT), Sampling(), stops, **more)  # type: ignore[arg-type]
        self.results.receive(Admitted(grant, request, Hit(match, match + 1, "never_kept", origin)))  # type: ignore[arg-type]
        return request

    def step(self, *tokens: int, grant: int = 1, **more: object) -> None:
        """Deliver one Stepped for each of these tokens, in which the grant has drawn that token."""
        for token in tokens:
            self._steps += 1
            fields = {"checkpoints": [], "logprobs": [], "prompt_logprobs": []} | more
            self.results.receive(Stepped(self._steps, [grant], pack([token]), **fields))  # type: ignore[arg-type]
            self.results.act()

    def fail(self, *failed: Failure, **more: object) -> None:
        self._steps += 1
        fields = {"checkpoints": [], "logprobs": [], "prompt_logprobs": [], "error": "broken"} | more
        self.results.receive(Stepped(self._steps, [], b"", failed=list(failed), **fields))  # type: ignore[arg-type]

    def retire(self, reason: RetireReason, position: int, grant: int = 1, poisoned: bool = False) -> None:
        self.results.receive(Retired(grant, reason, self.lease(), position, poisoned))
        self.results.act()

    def lease(self) -> Lease:
        lease = self.ledger.take("results")
        assert lease is not None
        return lease

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    @property
    def outputs(self) -> list[Output]:
        return [output for delta in self.of(Delta) for output in delta.outputs]

    @property
    def finishes(self) -> list[list[int]]:
        return [settled.finished for settled in self.of(Settled)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.ledger.close()


def test_a_stop_token_counts_after_min_tokens_and_adds_no_text(bench: Bench) -> None:
    bench.admit(Stops(9, min_tokens=2, token_ids=(7,)))
    bench.step(7, 7, 7)
    assert bench.finishes == [[], [], [1]]
    assert [output.text for output in bench.outputs] == ["", "7", "7", ""]
    assert (bench.outputs[-1].finish_reason, bench.outputs[-1].stop_reason) == ("stop", 7)


def test_the_last_of_max_tokens_is_shown(bench: Bench) -> None:
    bench.admit(Stops(2))
    bench.step(5, 6)
    assert bench.finishes == [[], [1]]
    assert bench.outputs[-1].finish_reason == "length" and "".join(o.text for o in bench.outputs) == "56"


def test_a_stop_string_ends_and_what_may_begin_one_is_held_back(bench: Bench) -> None:
    bench.admit(Stops(9, strings=("56",)))
    bench.step(4, 5)
    assert [output.text for output in bench.outputs] == ["", "4", ""]
    bench.step(6)
    assert bench.finishes[-1] == [1]
    assert (bench.outputs[-1].text, bench.outputs[-1].stop_reason) == ("", "56")


def test_what_is_held_back_is_shown_when_no_more_comes(bench: Bench) -> None:
    bench.admit(Stops(2, strings=("56",)))
    bench.step(4, 5)
    assert "".join(output.text for output in bench.outputs) == "45"


def test_a_token_drawn_after_the_end_is_discarded(bench: Bench) -> None:
    bench.admit(Stops(1))
    bench.step(5, 6)
    assert bench.outputs[-1].tokens == pack([5]) and bench.finishes == [[1], []]
    assert bench.results.counters["generation_tokens"] == 1


def test_the_hit_that_is_reported_is_limited_to_the_prompt(bench: Bench) -> None:
    """A resubmitted request includes its output so far, so more tokens may be cached than its prompt has."""
    bench.admit(Stops(3), match=2, origin="host")
    outputs = bench.outputs or (bench.results.act(), bench.outputs)[1]
    first = outputs[0]
    assert (first.prompt_tokens, first.completion_tokens) == (4, 0)
    assert first.hit == Hit(2, 3, "never_kept", "host")
    again = Bench()
    request = Request("r", pack([*PROMPT, 5, 6]), len(PROMPT), Sampling(), Stops(9), delivered_chars=1)
    again.results.receive(Admitted(1, request, Hit(5, 6)))
    again.results.act()
    [output] = again.outputs
    assert (output.hit.cached_tokens, output.hit.matched_tokens, output.completion_tokens, output.text) == (
        4,
        4,
        2,
        "6",
    )


# States at the end of a request: donated or freed


def test_a_state_that_the_tree_already_has_is_freed(bench: Bench) -> None:
    bench.admit(Stops(9))
    bench.step(5, checkpoints=[Checkpoint(1, 4, bench.lease())])
    bench.retire("aborted", 4)
    assert [(d.position, d.tokens, d.closes) for d in bench.of(Donate)] == [(4, pack(PROMPT), False)]
    assert [(len(free.leases), free.closes_grant) for free in bench.of(Free)] == [(1, 1)]


def test_a_state_that_advanced_is_donated_with_its_new_tokens(bench: Bench) -> None:
    bench.admit(Stops(9), match=1)
    bench.step(5, checkpoints=[Checkpoint(1, 4, bench.lease())])
    bench.retire("aborted", 5)
    donations = [(d.position, unpack(d.tokens), d.closes) for d in bench.of(Donate)]
    assert donations == [(4, [2, 3, 4], False), (5, [5], True)] and not bench.of(Free)


@pytest.mark.parametrize(("origin", "is_saved"), [("tree", False), ("slot", True)])
def test_a_session_s_state_that_did_not_advance_is_saved_only_if_it_was_moved(
    bench: Bench, origin: str, is_saved: bool
) -> None:
    """A copied state (origin "tree") is still in the tree; a moved one (origin "slot") is not."""
    bench.admit(Stops(9), match=3, origin=origin, session="s")
    bench.retire("aborted", 3)
    assert [(save.session, save.position, save.tokens) for save in bench.of(SaveFromReq)] == [("s", 3, b"")] * is_saved
    assert len(bench.of(Free)) == 1 - is_saved


def test_a_session_s_state_is_saved_with_the_tokens_since_the_last_donation(bench: Bench) -> None:
    bench.admit(Stops(9), match=1, session="s")
    bench.step(5, 6)
    bench.retire("aborted", 5)
    assert [(save.position, unpack(save.tokens)) for save in bench.of(SaveFromReq)] == [(5, [2, 3, 4, 5])]


def test_a_poisoned_state_and_checkpoint_are_freed(bench: Bench) -> None:
    bench.admit(Stops(9), session="s")
    bench.fail(Failure(1, 4), checkpoints=[Checkpoint(1, 4, bench.lease())])
    bench.retire("failed", 4, poisoned=True)
    assert [free.closes_grant for free in bench.of(Free)] == [None, 1]
    assert not bench.of(Donate) and not bench.of(SaveFromReq)


# Failures


def test_a_request_that_fails_where_it_failed_before_ends_with_the_cause(bench: Bench) -> None:
    request = bench.admit(Stops(9))
    bench.fail(Failure(1, 4))
    assert bench.of(Settled)[-1].failed == [1]
    bench.fail(Failure(1, 5), error="")
    bench.retire("failed", 5, poisoned=True)
    assert [(again.request, again.suspect_until) for again in bench.of(Requeue)] == [(request, 4)]
    for grant, position, ended in ((2, 6, False), (3, 6, True)):
        bench.results.receive(Admitted(grant, request, Hit()))
        bench.fail(Failure(grant, position), error=f"broken at {position}")
        bench.retire("failed", position, grant=grant, poisoned=True)
        assert bool(bench.of(Over)) is ended
    assert bench.of(Requeue)[-1].suspect_until == 6
    assert (bench.outputs[-1].finish_reason, bench.outputs[-1].stop_reason) == ("error", "broken at 6")


def test_an_abort_beats_a_failure_and_an_end_beats_an_abort(bench: Bench) -> None:
    bench.admit(Stops(9))
    bench.fail(Failure(1, 4))
    bench.retire("timeout", 4, poisoned=True)
    assert not bench.of(Requeue)
    assert (bench.outputs[-1].finish_reason, bench.outputs[-1].stop_reason) == ("abort", "timeout")
    bench.admit(Stops(1), grant=2)
    bench.step(5, grant=2)
    bench.retire("aborted", 4, grant=2)
    assert [output.finish_reason for output in bench.outputs][-2:] == [None, "length"]
    assert len(bench.of(Over)) == 2 and not bench.results.records


def test_a_retracted_request_is_requeued_with_its_output_and_otherwise_unchanged(bench: Bench) -> None:
    bench.admit(Stops(3))
    bench.step(5)
    bench.retire("retracted", 4)
    [again] = bench.of(Requeue)
    assert (unpack(again.request.tokens), again.request.prompt_len, again.suspect_until) == ([*PROMPT, 5], 4, 0)
    bench.results.receive(Ended("r", "aborted", "the request was aborted"))
    bench.results.act()
    assert (bench.outputs[-1].finish_reason, bench.outputs[-1].stop_reason) == ("abort", "aborted")
    assert bench.of(Over) == [Over("r")]


def test_a_resubmitted_request_that_no_longer_fits_ends_with_length(bench: Bench) -> None:
    bench.admit(Stops(3))
    bench.step(5)
    bench.retire("retracted", 4)
    bench.results.receive(Ended("r", "too_large", ""))
    bench.results.act()
    assert bench.outputs[-1].finish_reason == "length"


# Log probabilities


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, [])


def test_a_replay_reports_no_log_probability_twice(bench: Bench) -> None:
    bench.admit(Stops(9), prompt_logprobs_from=1)
    bench.fail(Failure(1, 4), prompt_logprobs=[RowLogprobs(1, 1, [logprob(2), logprob(3)])])
    bench.step(5, prompt_logprobs=[RowLogprobs(1, 2, [logprob(3), logprob(4)])])
    reported = [item.token for output in bench.outputs for item in output.prompt_logprobs]
    assert reported == [2, 3, 4]


def test_the_log_probability_of_a_discarded_token_is_discarded(bench: Bench) -> None:
    bench.admit(Stops(1))
    for token in (5, 6):
        bench.step(token, logprobs=[RowLogprobs(1, 4, [logprob(token)])])
    bench.retire("finished", 5)
    assert [item.token for output in bench.outputs for item in output.logprobs] == [5]


# Requests that are not resumed: keep="never"


@pytest.mark.parametrize("session", ["", "s"])
def test_with_keep_never_the_final_state_is_freed(bench: Bench, session: str) -> None:
    bench.admit(Stops(1), keep="never", session=session)
    bench.step(5)
    bench.retire("finished", 5)
    [freed] = bench.of(Free)
    assert freed.closes_grant == 1 and not bench.of(Donate) and not bench.of(SaveFromReq)


def test_with_keep_never_requested_checkpoints_are_still_donated(bench: Bench) -> None:
    bench.admit(Stops(1), keep="never", checkpoints=(3,))
    bench.step(5, checkpoints=[Checkpoint(1, 3, bench.lease())])
    bench.retire("finished", 5)
    [donation] = bench.of(Donate)
    assert (donation.position, donation.closes) == (3, False) and len(bench.of(Free)) == 1


def test_with_keep_never_a_retracted_state_is_still_donated(bench: Bench) -> None:
    bench.admit(Stops(3), keep="never")
    bench.step(5)
    bench.retire("retracted", 4)
    [donation] = bench.of(Donate)
    assert (donation.position, donation.closes) == (4, True) and not bench.of(Free)
    [again] = bench.of(Requeue)
    assert again.request.keep == "never"
    bench.results.receive(Ended("r", "aborted", ""))


def verify(bench: Bench, *tokens: int, drafts: int, **more: object) -> None:
    """Deliver a step in which the grant has fed this many drafts, and all draws but the last were right."""
    fields = {"checkpoints": [], "logprobs": [], "prompt_logprobs": [], "drafted": [Chunk(1, drafts)]} | more
    bench.results.receive(Stepped(1, [1] * len(tokens), pack(tokens), **fields))  # type: ignore[arg-type]
    bench.results.act()


def test_accepted_drafts_are_output_of_one_step(bench: Bench) -> None:
    bench.admit(Stops(9))
    verify(bench, 5, 6, 7, drafts=4)
    assert bench.of(Settled)[-1].advanced == [Advance(1, 2)]
    last = bench.outputs[-1]
    assert (last.text, unpack(last.tokens), last.accepted, last.rejected) == ("567", [5, 6, 7], 2, 2)


@pytest.mark.parametrize("stops", [Stops(9, token_ids=(6,)), Stops(9, strings=("6",)), Stops(2)], ids=str)
def test_tokens_after_a_stop_inside_accepted_drafts_are_discarded(bench: Bench, stops: Stops) -> None:
    bench.admit(stops, logprobs=0)
    items = [RowLogprobs(1, 4 + number, [TokenLogprob(token, -1.0, [])]) for number, token in enumerate((5, 6, 7))]
    verify(bench, 5, 6, 7, drafts=2, logprobs=items)
    assert (bench.of(Settled)[-1].finished, bench.of(Settled)[-1].advanced) == ([1], [Advance(1, 1)])
    assert unpack(bench.outputs[-1].tokens) == [5, 6] and [item.token for item in bench.outputs[-1].logprobs] == [5, 6]
    bench.retire("finished", 5)
    assert [unpack(donated.tokens) for donated in bench.of(Donate)] == [[*PROMPT, 5]]


def test_the_next_tokens_are_proposed_for_rows_that_go_on(bench: Bench) -> None:
    bench.results.draft = draft()
    bench.admit(Stops(9, token_ids=(9,)))
    bench.step(1, 2, propose=3)
    assert bench.of(Settled)[-1].proposals == [Proposal(1, 6, pack([3, 4, 1]), 0.5)]
    bench.step(3)
    assert not bench.of(Settled)[-1].proposals, "nothing was asked for"
    bench.step(4, 9, propose=3)
    assert bench.of(Settled)[-2].proposals and not bench.of(Settled)[-1].proposals, "it has stopped"


def test_what_the_head_predicts_is_proposed_where_more_of_it_is_expected_to_be_right(bench: Bench) -> None:
    bench.results.draft = draft("mtp")
    bench.admit(Stops(20))
    bench.step(1, propose=3, predicted=[RowDrafts(1, pack([2, 3, 7]))])
    assert bench.of(Settled)[-1].proposals == [Proposal(1, 5, pack([2, 3, 7]), 0.5)]
    bench.step(2, 3, 9, propose=3)
    settled = bench.of(Settled)
    assert [unpack(each.proposals[0].tokens) for each in settled[-3:-1]] == [[3, 7], [7]], "what has not come yet"
    assert not settled[-1].proposals, "7 was wrong"
    bench.step(4, propose=3, predicted=[RowDrafts(1, pack([2]))])
    assert bench.of(Settled)[-1].chance == pytest.approx(2.5 / 4, rel=0.01)
    verify(bench, 5, drafts=2)
    assert bench.results.counters["drafts_rejected:mtp"] == 2


def test_a_likely_repetition_is_proposed_before_the_prediction_of_the_head(bench: Bench) -> None:
    bench.results.draft = draft()
    bench.admit(Stops(40))
    bench.step(*PROMPT, *PROMPT, propose=3)
    bench.step(1, propose=3, predicted=[RowDrafts(1, pack([9, 9, 9]))])
    assert unpack(bench.of(Settled)[-1].proposals[0].tokens) == [2, 3, 4]
    bench.step(7, propose=3, predicted=[RowDrafts(1, pack([8]))])
    assert unpack(bench.of(Settled)[-1].proposals[0].tokens) == [8], "nothing repeats"
