"""Drafts from the request's own text."""

import pytest
from msgspec.structs import replace

from baton.actors.requests import Request, Sampling, Stops
from baton.actors.results.drafters import draft
from baton.actors.results.ngrams import NgramDrafter
from baton.actors.tokens import pack


@pytest.mark.parametrize(
    ("history", "most", "proposed"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([5, 6, 7, 6], 3, []),  # a single equal token says too little
        ([1, 2, 8, 9, 1, 2], 2, [8, 9]),
        ([1, 2, 8, 9, 1, 2], 4, [8, 9, 1, 2]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # the latest of two
        ([4, 1, 2, 8, 5, 1, 2, 9, 4, 1, 2], 1, [8]),  # more equal tokens are better than later ones
        ([7, 7, 7], 5, [7] * 5),  # a repetition up to the end goes on
        ([1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
    ],
)
def test_what_followed_the_latest_longest_repetition_is_proposed(
    history: list[int], most: int, proposed: list[int]
) -> None:
    drafter = NgramDrafter(history[:2])
    for token in history[2:]:
        drafter.push(token)
    assert drafter.propose(most)[0] == proposed


def test_a_prediction_counts_as_text_before_the_prompt() -> None:
    drafter = NgramDrafter([9, 1, 2], [1, 2, 3, 4])
    assert drafter.propose(8)[0] == [3, 4], "it ends with the prediction"
    for token in (3, 4):
        drafter.push(token)
    assert drafter.propose(8)[0] == [], "nothing follows, and the prompt is not what the client expects next"


def test_the_chance_is_the_share_of_proposals_that_were_right() -> None:
    drafter = NgramDrafter([1, 2, 3] * 4)
    assert drafter.propose(4)[1] == 0.5
    for token in (1, 2, 3, 1):
        drafter.push(token)
    _, high = drafter.propose(4)
    assert 0.8 < high < 1
    for other in range(20):
        drafter.propose(4)
        drafter.push(40 + other)
        for token in (1, 2, 3, 1):
            drafter.push(token)
    assert 0 < drafter.propose(4)[1] < 0.2


def test_after_a_wrong_proposal_nothing_is_counted_until_the_next() -> None:
    drafter = NgramDrafter([1, 2, 3, 1, 2])
    drafter.propose(3)
    drafter.push(9)
    _, before = NgramDrafter([1, 2]).propose(1)
    for token in (1, 2):
        drafter.push(token)
    assert before == 0.0 and drafter.propose(1)[1] == 0.25, "one was wrong; those after it were not proposed"


def test_a_request_may_want_no_drafts() -> None:
    request = Request("r", pack([1, 2]), 2, Sampling(), Stops(9), prediction=pack([1, 2, 7]))
    for kinds, chosen, makes in (
        ("auto", "auto", True),
        ("auto", "ngram", True),
        ("ngram", "auto", True),
        ("auto", "off", False),
        ("ngram", "mtp", False),
        ("mtp", "ngram", False),
    ):
        drafter = draft(kinds)(replace(request, speculation=chosen), [1, 2])
        assert (drafter is not None) == makes
        assert drafter is None or drafter.propose(1)[0] == [7]


def test_a_long_history_is_searched_in_bounded_time() -> None:
    drafter = NgramDrafter([1, 2, 3, *[9] * 200_000, 1, 2])
    assert drafter.propose(1)[0] == [], "the beginning is too far away"
    drafter = NgramDrafter([9] * 200_000)
    assert drafter.propose(3)[0] == [9, 9, 9]


@pytest.mark.parametrize("is_right", [True, False])
def test_requests_learn_from_each_other_how_often_repetitions_go_on(is_right: bool) -> None:
    """A new request neither feeds wrong drafts until it knows better, nor hesitates where drafts are right."""
    make = draft("ngram")
    request = Request(id="a", tokens=b"", prompt_len=0, sampling=Sampling(), stops=Stops(max_tokens=9))
    for _ in range(30):
        drafter = make(request, [1, 2, 3, 1, 2])
        assert drafter is not None
        drafter.propose(1)
        drafter.push(3 if is_right else 4)
    fresh = make(request, [1, 2, 3, 1, 2])
    assert fresh is not None
    _, chance = fresh.propose(1)
    assert chance > 0.9 if is_right else chance < 0.1
