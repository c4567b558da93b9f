"""Sessions over HTTP with a fake ring: the log after every kind of end, and which requests are allowed when."""

import asyncio
from typing import Any

import pytest

from baton.actors import tokens
from baton.actors.messages import Abort
from tests.api.fake_ring import EOS, FakeRing, Served, payloads, read_events, serving

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
REPLY_IDS = [*REPLY.encode(), EOS]
SESSIONS = "/v1/sessions"


def prompts(ring: FakeRing) -> list[list[int]]:
    return [tokens.unpack(request.tokens) for request in ring.submitted()]


async def create(served: Served, **body: Any) -> str:
    status, session = await served.post(SESSIONS, body)
    assert (status, session["turn"], session["position"], session["status"]) == (200, 0, 0, "idle")
    return f"{SESSIONS}/{session['id']}"


async def get(served: Served, path: str, **more: Any) -> Any:
    async with served.client.get(path, **more) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def turn(served: Served, session: str, **body: Any) -> Any:
    status, answer = await served.post(f"{session}/turns", {"temperature": 0, **body})
    assert status == 200, answer
    return answer


async def settled(served: Served, session: str, turns: int) -> Any:
    """Return the session when it is idle and has at least `turns` turns."""
    for _ in range(1000):
        seen = await get(served, session)
        if seen["status"] == "idle" and len(seen["turns"]) >= turns:
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError(seen)


async def test_each_turn_sends_the_whole_history_verbatim() -> None:
    async with serving() as served:
        session = await create(served)
        first = await turn(served, session, text="ab")
        assert (first["turn"], first["text"], first["output_ids"]) == (1, REPLY, REPLY_IDS)
        assert (first["start"], first["position"]) == (0, 2 + len(REPLY_IDS))
        second = await turn(served, session, input_ids=[7, 8], stop="o,")
        assert (second["turn"], second["start"], second["history"]) == (2, first["position"], first["position"])
        third = await turn(served, session, text="c", max_tokens=2)
        assert prompts(served.ring) == [
            [97, 98],
            [97, 98, *REPLY_IDS, 7, 8],
            [97, 98, *REPLY_IDS, 7, 8, *REPLY_IDS, 99],
        ]
        seen = await get(served, session)
    assert (seen["turn"], seen["position"]) == (3, third["position"])
    assert [t["position"] for t in seen["turns"]] == [first["position"], second["position"], third["position"]]
    assert [t["text"] for t in seen["turns"]] == [REPLY, REPLY, "He"]
    assert [t["status"] for t in seen["turns"]] == ["completed"] * 3


async def test_a_chat_turn_extends_the_history_or_reports_where_it_continues() -> None:
    async with serving() as served:
        session = await create(served)
        first = await turn(served, session, messages=[{"role": "user", "content": "x"}], max_tokens=5)
        second = await turn(served, session, messages=[{"role": "user", "content": "y"}])
        third = await turn(served, session, messages=[{"role": "user", "content": "z"}])
        sent = [bytes(prompt) for prompt in prompts(served.ring)]
        await turn(served, session, text="raw")
        status, error = await served.error(f"{session}/turns", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, error["code"]) == (400, "not_a_chat")
    assert sent[0] == b"user:x\nassistant:"
    assert sent[1] == sent[0] + b"Hello\nuser:y\nassistant:"
    assert sent[2] == sent[1] + REPLY.encode() + b"\nuser:z\nassistant:"
    assert second["start"] == second["history"] == first["position"]
    # This template does not render the token that ended the second answer, so the third turn starts one token earlier.
    assert third["start"] == third["history"] - 1 == second["position"] - 1


async def test_a_turn_that_only_feeds() -> None:
    async with serving() as served:
        session = await create(served)
        fed = await turn(served, session, messages=[{"role": "system", "content": "s"}], max_tokens=0)
        assert (fed["output_ids"], fed["text"], fed["status"]) == ([], "", "completed")
        assert fed["usage"]["completion_tokens"] == 0
        assert fed["position"] == len(b"system:s\n")
        answer = await turn(served, session, messages=[{"role": "user", "content": "x"}], max_tokens=2)
        assert bytes(prompts(served.ring)[-1]) == b"system:s\nuser:x\nassistant:"
        assert answer["start"] == fed["position"]
        async with served.client.post(
            f"{session}/turns", json={"text": "ab", "max_tokens": 0, "stream": True}
        ) as response:
            events = payloads(await read_events(response))
    assert [event["type"] for event in events] == ["turn.started", "turn.ended"]
    assert events[-1]["position"] == answer["position"] + 2


async def test_a_streamed_turn() -> None:
    async with serving() as served:
        session = await create(served)
        async with served.client.post(f"{session}/turns", json={"text": "ab", "stream": True}) as response:
            events = payloads(await read_events(response))
        again = await turn(served, session, text="c")
    started, *deltas, ended = events
    assert (started["type"], started["turn"], started["start"]) == ("turn.started", 1, 0)
    assert "".join(delta["text"] for delta in deltas) == ended["text"] == REPLY
    assert [id for delta in deltas for id in delta["output_ids"]] == REPLY_IDS
    assert (ended["type"], ended["status"], ended["position"]) == ("turn.ended", "completed", 2 + len(REPLY_IDS))
    assert again["start"] == ended["position"]


async def test_a_client_that_has_read_the_end_can_continue_at_once() -> None:
    async with serving(max_model_len=4096) as served:
        session = await create(served)
        for number in range(1, 30):
            async with served.client.post(f"{session}/turns", json={"text": "a", "stream": True}) as response:
                async for line in response.content:
                    if b"turn.ended" in line:
                        break
                answer = await turn(served, session, text="b", max_tokens=1)
                assert answer["turn"] == 2 * number


async def test_one_turn_at_a_time() -> None:
    async with serving() as served:
        session = await create(served)
        served.ring.held = True
        first = asyncio.ensure_future(turn(served, session, text="a"))
        await served.ring.until(lambda: served.ring.open)
        status, error = await served.error(f"{session}/turns", {"text": "b"})
        assert (status, error["code"]) == (409, "session_busy")
        assert (await served.error(f"{session}/rewind", {"turn": 0}))[0] == 409
        assert (await get(served, session))["status"] == "busy"
        _, fork = await served.post(f"{session}/fork", {})
        assert (fork["turn"], fork["position"]) == (0, 0)
        served.ring.release()
        assert (await first)["turn"] == 1
        assert (await turn(served, session, text="b"))["turn"] == 2


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize("how", ["abort", "disconnect"])
async def test_a_turn_that_is_cut_short_keeps_its_input_and_partial_answer(
    how: str, running: bool, earlier: int
) -> None:
    async with serving() as served:
        session = await create(served)
        before: list[int] = []
        if earlier:
            await turn(served, session, text="x")
            before = [120, *REPLY_IDS]
        served.ring.held, served.ring.pause = not running, 0.01
        task = asyncio.ensure_future(turn(served, session, text="ab"))
        await served.ring.until(lambda: served.ring.open)
        if running:
            await asyncio.sleep(0.05)
        if how == "abort":
            assert (await served.post("/abort_request", {"abort_all": True}))[1] == {"aborted": 1}
            answer = await task
            assert (answer["status"], answer["finish_reason"]) == ("aborted", "abort")
        else:
            task.cancel()
        seen = await settled(served, session, earlier + 1)
        last = seen["turns"][-1]
        assert last["status"] == {"abort": "aborted", "disconnect": "disconnected"}[how]
        assert (last["output_tokens"] > 0) == running
        received = REPLY_IDS[: last["output_tokens"]]
        assert seen["position"] == len(before) + 2 + len(received)
        served.ring.held, served.ring.pause = False, 0
        after = await turn(served, session, text="c", after=earlier + 1)
        assert prompts(served.ring)[-1] == [*before, 97, 98, *received, 99]
        assert after["turn"] == earlier + 2


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
async def test_a_timeout_leaves_the_session_usable(running: bool, earlier: int) -> None:
    async with serving(request_timeout=0.2) as served:
        session = await create(served)
        for _ in range(earlier):
            await turn(served, session, text="x")
        served.ring.held, served.ring.pause = not running, 0.05
        status, _ = await served.error(f"{session}/turns", {"text": "ab"})
        assert status == 504
        served.ring.held, served.ring.pause = False, 0
        seen = await get(served, session)
        assert (seen["turn"], seen["turns"][-1]["status"]) == (earlier + 1, "timeout")
        assert (seen["turns"][-1]["output_tokens"] > 0) == running
        assert (await turn(served, session, text="c"))["start"] == seen["position"]


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_failed_turn_is_noted_and_a_refused_one_leaves_no_trace(earlier: int) -> None:
    async with serving() as served:
        session = await create(served)
        for _ in range(earlier):
            await turn(served, session, text="x")
        before = await get(served, session)
        served.ring.refusal = "queue_full"
        assert (await served.error(f"{session}/turns", {"text": "ab"}))[0] == 429
        assert (await served.error(f"{session}/turns", {"input_ids": [10**6]}))[0] == 400
        assert await get(served, session) == before
        served.ring.refusal, served.ring.failing = None, True
        assert (await served.error(f"{session}/turns", {"text": "ab"}))[0] == 500
        served.ring.failing = False
        seen = await get(served, session)
        assert (seen["turn"], seen["turns"][-1]["status"]) == (earlier + 1, "failed")
        assert (await turn(served, session, text="c"))["start"] == seen["position"]


@pytest.mark.parametrize(
    "body", [{}, {"text": ""}, {"messages": []}, {"input_ids": []}, {"text": "a", "input_ids": [1]}]
)
async def test_a_turn_needs_something_to_feed(body: dict[str, Any]) -> None:
    async with serving() as served:
        session = await create(served)
        await turn(served, session, text="a")
        assert (await served.error(f"{session}/turns", body))[0] == 400
        assert (await turn(served, session, text="b"))["turn"] == 2


async def test_fields_of_openais_clients_that_turns_ignore() -> None:
    fields = ("user", "service_tier", "safety_identifier", "prompt_cache_retention", "verbosity", "metadata")
    prediction = {"type": "content", "content": "a"}
    async with serving() as served:
        session = await create(served)
        answer = await turn(served, session, text="a", prediction=prediction, **dict.fromkeys(fields, "x"))
        assert answer["status"] == "completed"


async def test_fork_and_rewind() -> None:
    async with serving() as served:
        session = await create(served)
        ends = [(await turn(served, session, text=text, max_tokens=2))["position"] for text in "abc"]
        _, fork = await served.post(f"{session}/fork", {"turn": 2, "id": "mine"})
        assert (fork["id"], fork["turn"], fork["position"]) == ("mine", 2, ends[1])
        assert fork["parent"] == {"session": session.removeprefix(f"{SESSIONS}/"), "turn": 2}
        await turn(served, f"{SESSIONS}/mine", text="d", max_tokens=1)
        assert bytes(prompts(served.ring)[-1]) == b"aHebHed"
        _, back = await served.post(f"{session}/rewind", {"turn": 1, "after": 3})
        assert (back["turn"], back["position"]) == (1, ends[0])
        again = await turn(served, session, text="e", max_tokens=1)
        assert bytes(prompts(served.ring)[-1]) == b"aHee"
        assert again["turn"] == 4  # not 2: turn numbers are never used again, so that each always names the same turn
        assert (await served.error(f"{session}/turns", {"text": "f", "after": 3}))[1]["code"] == "session_moved_on"
        assert (await served.error(f"{session}/rewind", {"turn": 2}))[1]["code"] == "unknown_turn"
        assert (await served.error(f"{session}/fork", {"turn": 9}))[1]["code"] == "unknown_turn"
        _, empty = await served.post(f"{session}/rewind", {"turn": 0})
        assert (empty["turn"], empty["position"]) == (0, 0)
        await turn(served, session, text="g", max_tokens=1, after=0)
        assert bytes(prompts(served.ring)[-1]) == b"g"
        assert len((await get(served, f"{SESSIONS}/mine"))["turns"]) == 3


async def test_rewinding_past_a_turn_that_was_rendered_again() -> None:
    async with serving() as served:
        session = await create(served)
        for content in "xyz":
            await turn(served, session, messages=[{"role": "user", "content": content}])
        sent = prompts(served.ring)
        await served.post(f"{session}/rewind", {"turn": 1})
        await turn(served, session, messages=[{"role": "user", "content": "w"}])
        seen = await get(served, session)
    assert prompts(served.ring)[-1] == [*sent[0], *REPLY.encode(), *b"\nuser:w\nassistant:"]
    assert seen["turns"][0]["position"] == len(sent[0]) + len(REPLY_IDS)


async def test_closing_a_busy_session_aborts_its_turn() -> None:
    async with serving() as served:
        session = await create(served)
        served.ring.held = True
        task = asyncio.ensure_future(turn(served, session, text="a"))
        await served.ring.until(lambda: served.ring.open)
        async with served.client.delete(session) as response:
            assert (response.status, (await response.json())["deleted"]) == (200, True)
        assert (await task)["finish_reason"] == "abort"
        assert len(served.sessions) == 0
        assert any(isinstance(message, Abort) for message in served.ring.sent)
        assert (await served.error(f"{session}/turns", {"text": "b"}))[1]["code"] == "session_not_found"


async def test_sessions_belong_to_the_key_that_made_them() -> None:
    async with serving(api_key=("one", "two")) as served:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert (await served.post(SESSIONS, {"id": "s"}, headers=one))[0] == 200
        assert (await served.error("/v1/sessions/s/turns", {"text": "a"}, headers=two))[0] == 404
        assert (await get(served, SESSIONS, headers=two))["data"] == []
        assert [s["id"] for s in (await get(served, SESSIONS, headers=one))["data"]] == ["s"]
        assert (await served.error(SESSIONS, {"id": "s"}, headers=one))[1]["code"] == "duplicate_session_id"
        assert (await served.post(SESSIONS, {"id": "s"}, headers=two))[0] == 200
        assert (await served.error(SESSIONS, {"id": "t"}))[0] == 401


async def test_the_least_recently_used_session_makes_room() -> None:
    async with serving(session_cap=2) as served:
        a, b = await create(served, id="a"), await create(served, id="b")
        await turn(served, a, text="x")
        await create(served, id="c")
        assert (await served.error(f"{b}/turns", {"text": "x"}))[0] == 404
        served.ring.held = True
        busy = [asyncio.ensure_future(turn(served, f"{SESSIONS}/{id}", text="x")) for id in "ac"]
        await served.ring.until(lambda: len(served.ring.open) == 2)
        status, error = await served.error(SESSIONS, {"id": "d"})
        assert (status, error["code"]) == (429, "too_many_sessions")
        served.ring.release()
        assert [answer["status"] for answer in await asyncio.gather(*busy)] == ["completed"] * 2
        await create(served, id="d")


async def test_sessions_in_memory_have_a_limit() -> None:
    """The least recently used sessions of the owner with most bytes are closed."""
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("large", "small")}
    async with serving(session_memory=2**20, api_key=tuple(keys), max_model_len=200_000) as served:

        async def create_with_turn(key: str, id: str, size: int) -> int | str:
            assert (await served.post(SESSIONS, {"id": id}, headers=keys[key]))[0] == 200
            body = {"input_ids": [1] * size, "max_tokens": 1}
            status, answer = await served.post(f"{SESSIONS}/{id}/turns", body, headers=keys[key])
            return status if status == 200 else str(answer["error"]["code"])

        async def left(key: str) -> set[str]:
            return {each["id"] for each in (await get(served, SESSIONS, headers=keys[key]))["data"]}

        assert await create_with_turn("small", "mine", 10_000) == 200
        for id in "ab":
            assert await create_with_turn("large", id, 50_000) == 200
        assert (await served.post(f"{SESSIONS}/b/fork", {"id": "fork"}, headers=keys["large"]))[0] == 200
        assert await create_with_turn("large", "c", 10) == 200
        assert await left("large") == {"b", "fork", "c"}, "with the fork, three of 400,000 bytes are too many"
        served.ring.held = True
        body = {"input_ids": [1], "max_tokens": 1}
        busy = [
            asyncio.ensure_future(served.post(f"{SESSIONS}/{id}/turns", body, headers=keys[key]))
            for key in keys
            for id in sorted(await left(key))
        ]
        await served.ring.until(lambda: len(served.ring.open) == len(busy))
        served.sessions._memory_cap = 2**17
        assert await create_with_turn("small", "more", 10) == "sessions_full"
        served.ring.release()
        assert [status for status, _ in await asyncio.gather(*busy)] == [200] * len(busy)


async def test_an_item_is_not_deleted_if_there_is_no_room_for_the_items_after_it() -> None:
    async with serving(session_memory=2**20) as served:
        path = "/v1/conversations"
        items = [{"type": "message", "role": "user", "content": text} for text in "abc"]
        _, made = await served.post(path, {"items": items})
        listed = (await get(served, f"{path}/{made['id']}/items"))["data"]
        served.sessions._memory_cap = 1
        async with served.client.delete(f"{path}/{made['id']}/items/{listed[0]['id']}") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (507, "sessions_full")
        assert (await get(served, f"{path}/{made['id']}/items"))["data"] == listed


async def test_an_idle_session_is_forgotten_but_never_during_a_turn() -> None:
    async with serving(session_idle_timeout=0.2) as served:
        idle, busy = await create(served, id="idle"), await create(served, id="busy")
        served.ring.held = True
        task = asyncio.ensure_future(turn(served, busy, text="x"))
        await served.ring.until(lambda: served.ring.open)
        await asyncio.sleep(0.25)
        assert (await served.error(f"{idle}/turns", {"text": "x"}))[0] == 404
        served.ring.release()
        await task
        assert (await get(served, busy))["turn"] == 1
        await asyncio.sleep(0.25)
        assert (await get(served, SESSIONS))["data"] == []
