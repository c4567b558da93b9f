"""SGLang's sessions, as its clients use them."""

import asyncio
import threading
from typing import Any

import pytest

from baton.actors import tokens
from baton.api.generation.offload import THREAD_ABOVE
from baton.api.sessions.session import OpenTurn
from tests.api.connections.test_connections import until
from tests.api.fake_ring import EOS, FakeText, Served, payloads, read_events, serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio
REPLY_IDS = [*"Hello, wörld.".encode(), EOS]


async def open_session(served: Served, **body: Any) -> str:
    status, id = await served.post("/open_session", {"capacity_of_str_len": 1000, **body})
    assert status == 200 and isinstance(id, str)
    return id


def body_of(session: str, ids: list[int], count: int, rid: str | None = None, **params: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": count},
        "session_params": {"id": session, "rid": rid, **params},
    }


async def turn(served: Served, *args: Any, **params: Any) -> tuple[list[int], str]:
    """Run a turn; return the prompt that the ring got, and the request's id."""
    status, answer = await served.post("/generate", body_of(*args, **params))
    assert status == 200, answer
    return tokens.unpack(served.ring.submitted()[-1].tokens), answer["meta_info"]["id"]


async def refusal(served: Served, *args: Any, **params: Any) -> str:
    status, error = await served.error("/generate", body_of(*args, **params))
    assert status == 400
    return str(error["message"])


async def test_opening_and_closing() -> None:
    async with serving() as served:
        assert await open_session(served, session_id="mine", streaming=True, timeout=30.0) == "mine"
        assert len(await open_session(served)) > 20
        status, error = await served.error("/open_session", {"capacity_of_str_len": 9, "session_id": "mine"})
        assert (status, error["code"]) == (400, "duplicate_session_id")
        for _ in range(2):
            async with served.client.post("/close_session", json={"session_id": "mine"}) as response:
                assert response.status == 200
        assert "does not exist" in await refusal(served, "mine", [1], 1)
        assert (await served.error("/close_session", {}))[0] == 400
        await open_session(served, session_id="mine")


async def test_a_streaming_session_is_append_only() -> None:
    async with serving() as served:
        id = await open_session(served, streaming=True)
        sent, first = await turn(served, id, [1, 2], 3)
        assert sent == [1, 2]
        sent, _ = await turn(served, id, [3], 100, first)
        assert sent == [1, 2, *REPLY_IDS[:3], 3]
        sent, _ = await turn(served, id, [4], 1)
        assert sent == [1, 2, *REPLY_IDS[:3], 3, *REPLY_IDS, 4]
        for params in ({"replace": True}, {"drop_previous_output": True}, {"offset": 2}):
            assert "streaming sessions do not support" in await refusal(served, id, [5], 1, **params)
        assert "last request" in await refusal(served, id, [5], 1, first)
        assert "the turn is empty" in await refusal(served, id, [], 1)
        assert "one prompt" in await refusal(served, id, [[1], [2]], 1)
        sent, _ = await turn(served, id, [5], 0)
        assert sent[-3:] == [4, REPLY_IDS[0], 5]
        assert (await turn(served, id, [6], 1))[0] == [*sent, 6]


async def test_one_turn_at_a_time() -> None:
    async with serving() as served:
        id = await open_session(served, streaming=True)
        served.ring.held = True
        first = asyncio.ensure_future(turn(served, id, [1], 1))
        await served.ring.until(lambda: served.ring.open)
        assert "is busy with another turn" in await refusal(served, id, [2], 1)
        served.ring.release()
        await first
        assert (await turn(served, id, [2], 1))[0] == [1, REPLY_IDS[0], 2]


async def test_branching_turns() -> None:
    async with serving() as served:
        id = await open_session(served)
        _, root = await turn(served, id, [1, 2, 3], 3)
        history = [1, 2, 3, *REPLY_IDS[:3]]
        left, one = await turn(served, id, [4], 1, root)
        right, _ = await turn(served, id, [5], 1, root)
        assert (left, right) == ([*history, 4], [*history, 5])
        assert (await turn(served, id, [6], 1, root, offset=-1))[0] == [*history[:-1], 6]
        assert (await turn(served, id, [6], 1, root, offset=2))[0] == [1, 2, 6]
        assert (await turn(served, id, [6], 1, root, drop_previous_output=True))[0] == [1, 2, 3, 6]
        assert (await turn(served, id, [6], 1, one))[0] == [*left, REPLY_IDS[0], 6]
        assert (await turn(served, id, [7], 1))[0] == [7]
        sent, replacing = await turn(served, id, [8], 1, root, replace=True)
        assert sent == [*history, 8]
        assert "no request" in await refusal(served, id, [9], 1, one)
        await turn(served, id, [9], 1, None, replace=True)
        assert "no request" in await refusal(served, id, [9], 1, replacing)


async def test_replacing_a_request_that_runs() -> None:
    async with serving() as served:
        id = await open_session(served)
        served.ring.pause = 0.01
        body = body_of(id, [1, 2], 100) | {"rid": "first", "stream": True}
        async with served.client.post("/generate", json=body) as response:
            await response.content.readline()
            sent, _ = await turn(served, id, [3], 1, "first", replace=True)
            events = payloads(await read_events_after_first(response))
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert sent == [1, 2, *events[-1]["output_ids"], 3]


class SlowText:
    """Makes the tokenizer wait: a text that is tokenized in a thread is one token, when `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        encode = FakeText.encode

        def waiting(text: FakeText, prompt: str, add_special_tokens: bool = True) -> list[int]:
            return self._wait() if len(prompt) > THREAD_ABOVE else encode(text, prompt, add_special_tokens)

        monkeypatch.setattr(FakeText, "encode", waiting)

    def _wait(self) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(10)
        return [9]

    async def post(self, served: Served, session: str, rid: str, **more: Any) -> "asyncio.Future[tuple[int, Any]]":
        """Send a turn with a slow text. Return its answer to come, when the text is being tokenized."""
        body = {
            "text": "a" * (THREAD_ABOVE + 1),
            "rid": rid,
            "sampling_params": {"temperature": 0, "max_new_tokens": 100},
            "session_params": {"id": session},
        }
        answer = asyncio.ensure_future(served.post("/generate", body, **more))
        assert await asyncio.to_thread(self.begun.wait, 10)
        return answer


def running(served: Served) -> OpenTurn:
    """Return the running turn of the only session."""
    [session] = served.sessions
    assert session.running is not None
    return session.running


@not_through_router
async def test_replacing_a_request_whose_prompt_is_still_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not submitted, and the turn that replaces it does not wait for its answer."""
    text = SlowText(monkeypatch)
    async with serving(max_model_len=THREAD_ABOVE + 100) as served:
        id = await open_session(served)
        first = await text.post(served, id, "first")
        second = asyncio.ensure_future(turn(served, id, [3], 1, None, replace=True))
        await until(lambda: running(served).replaced)
        text.go_on.set()
        status, answer = await first
        assert (status, answer["error"]["code"]) == (503, "aborted")
        assert (await second)[0] == [3] and len(served.ring.submitted()) == 1


@not_through_router
async def test_going_on_from_a_request_whose_prompt_is_still_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is aborted when it is submitted, so that there is a turn to continue."""
    text = SlowText(monkeypatch)
    async with serving(max_model_len=THREAD_ABOVE + 100) as served:
        served.ring.pause = 0.05
        id = await open_session(served)
        first = await text.post(served, id, "first")
        second = asyncio.ensure_future(turn(served, id, [3], 1, "first", replace=True))
        await until(lambda: running(served).cut_short)
        text.go_on.set()
        status, answer = await first
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert (await second)[0] == [9, *answer["output_ids"], 3]


@not_through_router
@pytest.mark.parametrize("how", ["replace", "close"])
async def test_a_request_that_is_not_submitted_yet_ends_no_other_with_its_id(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The ring has requests of other API keys under ids that a client may choose for its own."""
    text = SlowText(monkeypatch)
    mine, theirs = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("mine", "theirs"))
    async with serving(max_model_len=THREAD_ABOVE + 100, api_key=("mine", "theirs")) as served:
        served.ring.held = True
        other = asyncio.ensure_future(served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **theirs))
        await served.ring.until(lambda: served.ring.open)
        _, id = await served.post("/open_session", {"capacity_of_str_len": 1000}, **mine)
        first = await text.post(served, id, next(iter(served.ring.open)), **mine)
        if how == "close":
            async with served.client.post("/close_session", json={"session_id": id}, **mine) as response:
                assert response.status == 200
        else:
            replacing = asyncio.ensure_future(served.post("/generate", body_of(id, [3], 1, replace=True), **mine))
            await until(lambda: running(served).replaced)
        text.go_on.set()
        assert (await first)[0] in (400, 503)
        served.ring.release()
        if how == "replace":
            assert (await replacing)[0] == 200
        status, answer = await other
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


async def test_a_replacement_that_is_refused_replaces_nothing() -> None:
    async with serving() as served:
        id = await open_session(served)
        _, root = await turn(served, id, [1, 2], 1)
        _, child = await turn(served, id, [3], 1, root)
        served.ring.refusal = "queue_full"
        status, _ = await served.error("/generate", body_of(id, [4], 1, root, replace=True))
        served.ring.refusal = None
        assert status == 429
        assert (await turn(served, id, [5], 1, child))[0][-1] == 5
        await turn(served, id, [6], 1, root, replace=True)
        assert "no request" in await refusal(served, id, [7], 1, child)


async def read_events_after_first(response: Any) -> list[bytes]:
    body = (await response.read()).removesuffix(b"\n\n").lstrip(b"\n")
    return [block for block in body.split(b"\n\n") if block]


async def test_other_fields_still_work() -> None:
    async with serving() as served:
        id = await open_session(served, streaming=True)
        body = body_of(id, [97], 2) | {"return_logprob": True, "stream": True, "rid": "mine"}
        async with served.client.post("/generate", json=body) as response:
            last = payloads(await read_events(response))[-1]
        assert last["text"] == "He" and len(last["meta_info"]["output_token_logprobs"]) == 2
        assert last["meta_info"]["id"] == "mine"
        status, plain = await served.post("/generate", {"text": "a", "session_params": {}})
        assert (status, plain["output_ids"]) == (200, REPLY_IDS)
        body = {"text": "b", "sampling_params": {"max_new_tokens": 1}, "session_params": {"id": id}}
        assert (await served.post("/generate", body))[0] == 200
        assert bytes(tokens.unpack(served.ring.submitted()[-1].tokens)) == b"aHeb"
        assert "session_params" in await refusal(served, id, [1], 1, unknown=3)
