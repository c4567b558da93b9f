"""The defaults of requests, and how a request is submitted again after a restart."""

from baton.actors.cache.below.limits import NO_TIERS
from baton.actors.messages import Acquire, Requeue, Retired, Submit
from baton.actors.requests import Hit, Output, Request, Sampling, Stops, resubmission
from baton.actors.tokens import pack, unpack

PLAIN = Sampling()


def test_the_defaults_draw_from_the_whole_distribution() -> None:
    """By default no parameter changes the model's distribution, and only the number of tokens is limited."""
    assert (PLAIN.temperature, PLAIN.top_k, PLAIN.top_p, PLAIN.min_p) == (1.0, 0, 1.0, 0.0)
    assert (PLAIN.repetition_penalty, PLAIN.presence_penalty, PLAIN.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (PLAIN.logit_bias, PLAIN.seed) == ({}, 0)
    assert Stops(5) == Stops(5, min_tokens=0, strings=(), token_ids=(), keep_stop=False)
    request = Request("r", b"", 0, PLAIN, Stops(5))
    assert (request.priority, request.salt, request.session, request.trace) == (0, "", "", "")
    assert request.skip_special_tokens and request.delivered_chars == 0
    assert Acquire(1, b"", 0, "", None).priority == 0 and Requeue(request).suspect_until == 0
    assert not Submit(request).resubmitted and not Retired(1, "finished", None, 0).poisoned  # type: ignore[arg-type]
    output = Output("r", "", b"", 1, 0)
    assert output.hit == Hit(0, 0, "", "tokens")
    assert (output.finish_reason, output.stop_reason, output.logprobs, output.prompt_logprobs) == (None, None, [], [])


def test_without_tiers_nothing_fits_below_the_pool() -> None:
    assert (NO_TIERS.host_bytes, NO_TIERS.disk_bytes, NO_TIERS.session_slots) == (0, 0, None)
    assert NO_TIERS.memory_bytes(0) > 0 and NO_TIERS.memory_bytes(5) == NO_TIERS.memory_bytes(0)


def test_a_resubmission_contains_the_delivered_output() -> None:
    request = Request("r", pack([1, 2, 3]), 3, PLAIN, Stops(5), prompt_logprobs_from=1)
    again = resubmission(request, pack([7, 8]), 4)
    assert (unpack(again.tokens), again.prompt_len, again.delivered_chars) == ([1, 2, 3, 7, 8], 3, 4)
    assert again.prompt_logprobs_from is None, "they came with the first output"
    assert resubmission(again, pack([7, 8, 9]), 5).tokens == pack([1, 2, 3, 7, 8, 9])
    assert resubmission(request, b"", 0) == request
