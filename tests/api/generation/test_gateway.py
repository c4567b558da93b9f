"""The gateway, which is the api's actor, without a ring: dispatch, merging of outputs, aborts, timeouts, ids, drain."""

import asyncio

import pytest

from baton.actors import tokens
from baton.actors.messages import (
    Abort,
    Continue,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Message,
    Pause,
    Paused,
    Restarted,
    Submit,
)
from baton.actors.requests import Hit, Output, Request, Sampling, Stops
from baton.api.errors import ApiError, internal
from baton.api.generation.gateway import Gateway
from baton.api.generation.outputs import MERGE_ABOVE

pytestmark = pytest.mark.anyio


class Post:
    """A gateway, and the messages that it sends to the ring."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.gateway = Gateway(timeout).bind(lambda to, message: self.sent.append((to, message)))
        self.sent: list[tuple[str, Message]] = []

    def output(self, id: str, n: int, finish: str | None = None) -> None:
        self.gateway.receive(Delta([Output(id, f"t{n} ", tokens.pack([n]), 3, n + 1, finish, hit=Hit(1))]))


def request(id: str) -> Request:
    return Request(id, tokens.pack([1, 2, 3]), 3, Sampling(), Stops(1000))


async def test_outputs_arrive_in_order_and_end() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        post.output("a", 0)
        assert [o.text for _, o in await generation.next()] == ["t0 "]
        post.output("a", 1, "stop")
        [(index, last)] = await generation.next()
        assert (index, last.finish_reason, generation.finished) == (0, "stop", True)
    assert not [m for _, m in post.sent if isinstance(m, Abort)]
    assert post.gateway.open_requests == 0


async def test_on_end_is_called_once_for_each_member() -> None:
    post = Post()
    ends: list[tuple[str, bytes]] = []
    post.gateway.on_end = lambda member: ends.append((member.request.id, bytes(member.delivered)))
    with post.gateway.submit([request("finished"), request("left"), request("aborted")]):
        post.output("finished", 0)
        post.output("left", 0)
        post.output("finished", 1, "stop")
        post.gateway.receive(Ended("aborted", "aborted", ""))
    post.output("left", 1, "abort")
    assert ends == [("finished", tokens.pack([0, 1])), ("aborted", b""), ("left", tokens.pack([0]))]


async def test_a_slow_reader_gets_merged_outputs() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        for n in range(5 * MERGE_ABOVE):
            post.output("a", n, "length" if n == 5 * MERGE_ABOVE - 1 else None)
            assert len(generation.members[0].pending) <= MERGE_ABOVE
        [(_, merged)] = await generation.next()
    assert tokens.unpack(merged.tokens) == list(range(5 * MERGE_ABOVE))
    assert merged.text == "".join(f"t{n} " for n in range(5 * MERGE_ABOVE))
    assert (merged.completion_tokens, merged.finish_reason) == (5 * MERGE_ABOVE, "length")


async def test_leaving_early_aborts_and_drops_late_outputs() -> None:
    post = Post()
    with post.gateway.submit([request("a")]):
        pass
    assert post.sent[-1] == ("scheduler", Abort("a", "aborted"))
    with pytest.raises(ApiError) as caught:
        post.gateway.submit([request("a")])
    assert (caught.value.status, caught.value.param) == (400, "rid")
    post.output("a", 0)
    post.output("a", 1, "abort")
    with post.gateway.submit([request("a")]) as again:
        assert again.members[0].pending == []


async def test_leaving_after_the_end_does_not_abort_a_new_request_with_the_same_id() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as first:
        post.output("a", 0, "stop")
        second = post.gateway.submit([request("a")])
        await first.next()
    assert not [m for _, m in post.sent if isinstance(m, Abort)]
    post.output("a", 0, "stop")
    assert [o.finish_reason for _, o in await asyncio.wait_for(second.next(), 1)] == ["stop"]
    second.close()


async def test_an_id_cannot_be_open_twice() -> None:
    post = Post()
    with post.gateway.submit([request("a")]):
        for requests in ([request("a")], [request("b"), request("b")]):
            with pytest.raises(ApiError) as caught:
                post.gateway.submit(requests)
            assert caught.value.code == "duplicate_request_id"
    assert "b" not in {m.request.id for _, m in post.sent if hasattr(m, "request") and isinstance(m.request, Request)}


@pytest.mark.parametrize(
    ("reason", "status", "retry"), [("queue_full", 429, True), ("too_large", 400, False), ("draining", 503, True)]
)
async def test_a_refusal_becomes_a_status(reason: str, status: int, retry: bool) -> None:
    post = Post()
    with post.gateway.submit([request("a"), request("b")]) as generation:
        post.gateway.receive(Ended("a", reason, "because"))
        with pytest.raises(ApiError) as caught:
            await generation.next()
    assert (caught.value.status, caught.value.message) == (status, "because")
    assert ("Retry-After" in caught.value.headers) == retry
    assert [m.request for _, m in post.sent if isinstance(m, Abort)] == ["b"]


async def test_the_timeout_aborts_even_without_a_reader() -> None:
    post = Post(timeout=0.01)
    with post.gateway.submit([request("a")]) as generation:
        await asyncio.sleep(0.05)
        assert post.sent[-1] == ("scheduler", Abort("a", "timeout"))
        with pytest.raises(ApiError) as caught:
            await generation.next()
    assert caught.value.status == 504


async def test_abort_by_id_ends_a_request_or_its_batch() -> None:
    post = Post()
    with post.gateway.submit([request("x_0"), request("x_1"), request("x_10b"), request("y_1")]) as generation:
        post.gateway.abort("x")
        post.gateway.abort("y")
        assert not any(isinstance(message, Abort) for _, message in post.sent)
        assert post.gateway.abort_batch("x") == 2
        assert post.gateway.abort_batch("nothing") == 0
        post.gateway.receive(Ended("x_0", "aborted", ""))
        [(index, output)] = await generation.next()
        assert (index, output.finish_reason) == (0, "abort")


async def test_a_failed_row_is_an_internal_error_that_names_the_cause() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        post.gateway.receive(Delta([Output("a", "", b"", 3, 0, "error", "ValueError: no kernel")]))
        with pytest.raises(ApiError, match="ValueError: no kernel") as caught:
            await generation.next()
    assert caught.value.status == 500


async def test_an_output_that_cannot_follow_its_grammar_is_an_error_of_the_client() -> None:
    post = Post()
    with post.gateway.submit([request("a"), request("b")]) as generation:
        post.gateway.receive(Delta([Output("a", "", b"", 3, 0, "grammar", "after 'x': nothing can follow there")]))
        with pytest.raises(ApiError, match="after 'x': nothing can follow") as caught:
            await generation.next()
        assert [message for _, message in post.sent if isinstance(message, Abort)] == [Abort("b", "aborted")]
    assert (caught.value.status, caught.value.code) == (400, "grammar_dead_end")


async def test_a_restart_resubmits_open_requests_with_their_delivered_tokens() -> None:
    post = Post()
    gateway = post.gateway
    with (
        gateway.submit([request("a"), request("b"), request("c"), request("d")]) as generation,
        gateway.submit([request("gone")]) as left,
    ):
        post.output("a", 0)
        post.output("a", 1)
        post.output("d", 0, "stop")
        assert len(await generation.next()) == 2
        left.close()
        gateway.abort("c")
        post.sent.clear()
        gateway.receive(Restarted())
        again = [message for _, message in post.sent if isinstance(message, Submit)]
        assert [(m.request.id, m.resubmitted) for m in again] == [("a", True), ("b", True)]
        assert tokens.unpack(again[0].request.tokens) == [1, 2, 3, 0, 1]
        assert (again[0].request.prompt_len, again[0].request.delivered_chars) == (3, len("t0 t1 "))
        assert again[1].request == request("b")
        assert [(index, output.finish_reason) for index, output in await generation.next()] == [(2, "abort")]
        gateway.receive(Delta([Output("a", "", b"", 3, 2, hit=Hit(2, 3, "evicted"))]))
        post.output("a", 2, "stop")
        [(_, rest)] = await generation.next()
        assert (rest.text, rest.completion_tokens, rest.finish_reason) == ("t2 ", 3, "stop")
        assert (rest.hit.cached_tokens, rest.hit.miss_reason, generation.members[0].cached_tokens) == (1, "", 1)
    assert gateway.submit([request("gone")]).members


async def test_after_a_restart_a_request_that_no_longer_fits_ends_with_length() -> None:
    post = Post()
    with post.gateway.submit([request("a"), request("b")]) as generation:
        post.output("a", 0)
        await generation.next()
        post.gateway.receive(Restarted())
        post.gateway.receive(Ended("a", "too_large", "5 tokens do not fit"))
        assert [output.finish_reason for _, output in await generation.next()] == ["length"]
        post.gateway.receive(Ended("b", "too_large", "5 tokens do not fit"))
        with pytest.raises(ApiError, match="do not fit"):
            await generation.next()


async def test_a_restart_flushes_and_drains_again() -> None:
    post = Post()
    flushing = asyncio.ensure_future(post.gateway.flush())
    await asyncio.sleep(0)
    post.gateway.receive(Restarted())
    (_, first), (_, again) = [sent for sent in post.sent if isinstance(sent[1], Flush)]
    assert first == again
    post.gateway.receive(Flushed(again.ticket))
    await flushing
    with post.gateway.submit([request("a")]):
        pass
    draining = asyncio.ensure_future(post.gateway.drain(0))
    await asyncio.sleep(0)
    assert ("scheduler", Drain()) not in post.sent
    post.gateway.receive(Restarted())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    post.gateway.receive(Restarted())
    assert post.sent[-2:] == [("scheduler", Drain())] * 2
    post.gateway.receive(Drained([]))
    assert await draining == []


async def test_a_lost_ring_fails_all_waiting_calls() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        draining = asyncio.ensure_future(post.gateway.drain(60))
        await asyncio.sleep(0)
        post.gateway.lose_ring(internal("gone"))
        for waiting in (generation.next(), draining):
            with pytest.raises(ApiError, match="gone"):
                await waiting


async def test_next_returns_nothing_after_its_wait() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        assert await generation.next(0.01) == []
        assert not generation.finished


async def test_flush_waits_for_the_cache() -> None:
    post = Post()
    flushing = asyncio.ensure_future(post.gateway.flush())
    await asyncio.sleep(0)
    [(to, message)] = post.sent
    assert to == "cache" and isinstance(message, Flush) and not flushing.done()
    post.gateway.receive(Flushed(message.ticket))
    await flushing
    flushing = asyncio.ensure_future(post.gateway.flush())
    await asyncio.sleep(0)
    post.gateway.fail_all(internal("gone"))
    with pytest.raises(ApiError, match="gone"):
        await flushing


async def test_drain_waits_for_open_requests_then_goes_round() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        draining = asyncio.ensure_future(post.gateway.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            post.gateway.submit([request("b")])
        assert caught.value.status == 503
        assert not any(isinstance(m, Drain) for _, m in post.sent)
        post.output("a", 0, "stop")
        assert (await generation.next())[0][1].finish_reason == "stop"
        await asyncio.sleep(0)
    assert post.sent[-1] == ("scheduler", Drain())
    post.gateway.receive(Drained(["slot 3"]))
    assert await draining == ["slot 3"]


async def test_drain_answers_503_to_requests_that_do_not_finish() -> None:
    post = Post()
    with post.gateway.submit([request("a")]) as generation:
        draining = asyncio.ensure_future(post.gateway.drain(0))
        with pytest.raises(ApiError) as caught:
            await generation.next()
        assert caught.value.status == 503
        assert ("scheduler", Abort("a", "aborted")) in post.sent
        assert ("scheduler", Drain()) not in post.sent
        post.output("a", 0, "abort")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert post.sent[-1] == ("scheduler", Drain())
    post.gateway.receive(Drained([]))
    assert await draining == []


async def test_a_pause_outlives_a_restart_of_the_ring() -> None:
    """The new scheduler gets the Pause before any request."""
    post = Post()
    with post.gateway.submit([request("a")]):
        pausing = asyncio.ensure_future(post.gateway.pause("in_place"))
        await asyncio.sleep(0)
        post.sent.clear()
        post.gateway.receive(Restarted())
        [(_, pause), (_, submit)] = post.sent
        assert isinstance(pause, Pause) and isinstance(submit, Submit) and not pausing.done()
        post.gateway.receive(Paused(pause.ticket))
        await pausing
        post.sent.clear()
        post.gateway.receive(Restarted())
        assert [type(message) for _, message in post.sent] == [Pause, Submit]
        post.gateway.resume()
        assert post.sent[-1] == ("scheduler", Continue())
        pausing = asyncio.ensure_future(post.gateway.pause("retract"))
        await asyncio.sleep(0)
        post.gateway.resume()
        post.sent.clear()
        post.gateway.receive(Restarted())
        assert [type(message) for _, message in post.sent] == [Submit]
        await pausing


async def test_a_pending_pause_fails_when_the_ring_is_lost() -> None:
    post = Post()
    pausing = asyncio.ensure_future(post.gateway.pause("retract"))
    await asyncio.sleep(0)
    post.gateway.fail_all(internal("over"))
    with pytest.raises(ApiError, match="over"):
        await pausing
