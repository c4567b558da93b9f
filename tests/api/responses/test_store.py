"""Stored responses: their bytes, chains, input items and metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.responses.events import Transcript
from baton.api.responses.store import ResponseStore, StoredResponse
from tests.api.fake_ring import VOCAB, FakeText, Served, serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
PATH = "/v1/responses"
OWNER = b"me"
PARSED = ParsedAnswer(ServedModel(FakeText(), VOCAB, 100), Prompt([1]))


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as client:
        yield client


def keep(store: ResponseStore, id: str, size: int, previous: StoredResponse | None = None) -> StoredResponse:
    """Store an ended response of `size` bytes."""
    transcript = Transcript({"id": id, "status": "completed", "background": False}, PARSED)
    response = StoredResponse(id=id, transcript=transcript, previous=previous, messages=[], size=size)
    store.put(OWNER, response)
    store.mark_ended(OWNER, response)
    return response


def stored(store: ResponseStore, *ids: str) -> list[bool]:
    return [store.find(OWNER, id) is not None for id in ids]


async def test_the_oldest_are_dropped_beyond_the_cap() -> None:
    store = ResponseStore(retention=60, cap=100)
    for id in "abc":
        keep(store, id, 40)
    assert stored(store, "a", "b", "c") == [False, True, True]
    assert store.bytes == 80
    keep(store, "huge", 101)
    assert (stored(store, "b", "c", "huge"), store.bytes) == ([False] * 3, 0)


async def test_a_deleted_response_counts_while_others_continue_it() -> None:
    store = ResponseStore(retention=60, cap=100)
    first = keep(store, "a", 30)
    second = keep(store, "b", 30, first)
    third = keep(store, "c", 30, first)
    store.delete(OWNER, "a")
    assert (stored(store, "a", "b", "c"), store.bytes) == ([False, True, True], 90)
    store.delete(OWNER, "b")
    assert store.bytes == 60
    keep(store, "d", 50, second)  # "d" continues "b", and through "b" also "a"
    assert (stored(store, "c", "d"), store.bytes) == ([False, False], 0)
    assert third.refcount == second.refcount == first.refcount == 0


async def test_shared_turns_count_once() -> None:
    async with serving() as served, client_of(served) as client:
        _, session = await served.post("/v1/sessions", {})
        path, responses = f"/v1/sessions/{session['id']}", served.responses
        await served.post(f"{path}/turns", {"messages": [{"role": "user", "content": "x"}]})
        ids = [(await client.responses.create(model="fake", input="a", conversation=session["id"])).id for _ in "ab"]
        log = sum(each.log_bytes for each in served.sessions)
        bodies = sum(response.size for id in ids if (response := responses.find(b"", id)))
        assert responses.bytes == bodies + log > log > 0
        await served.client.delete(path)
        await client.responses.delete(ids[0])
        assert responses.bytes > log
        await client.responses.delete(ids[1])
        assert responses.bytes == 0


async def test_a_running_response_is_not_dropped() -> None:
    now = 0.0
    store = ResponseStore(retention=10, cap=100, clock=lambda: now)
    transcript = Transcript({"id": "a", "status": "in_progress", "background": True}, PARSED)
    running = StoredResponse(id="a", transcript=transcript, messages=[], size=50)
    store.put(OWNER, running)
    now = 20.0
    keep(store, "b", 80)
    assert stored(store, "a", "b") == [True, True]
    store.mark_ended(OWNER, running)
    assert (stored(store, "a", "b"), store.running) == ([True, False], 0)
    now = 31.0
    assert (stored(store, "a"), store.bytes) == ([False], 0)


async def test_what_a_lane_remembers_displaces_no_other_owners_responses() -> None:
    """An owner with too many bytes loses what its lanes remember, the oldest first, and then its stored responses."""
    store, dropped = ResponseStore(retention=10, cap=100, clock=lambda: 0.0), list[str]()
    keep(store, "theirs", 30)

    def remember(lane: str, size: int) -> None:
        transcript = Transcript({"id": lane, "status": "in_progress", "background": False}, PARSED)
        response = StoredResponse(id=lane, transcript=transcript, messages=[], size=size)

        def drop() -> None:
            dropped.append(lane)
            store.forget(b"mine", lane)

        store.remember(b"mine", lane, response, drop)

    remember("one", 40), remember("two", 20)
    assert (dropped, store.bytes) == ([], 90)
    remember("three", 60)
    assert (dropped, store.bytes) == (["one", "two"], 90)
    remember("four", 200)
    assert dropped == ["one", "two", "three", "four"] and (stored(store, "theirs"), store.bytes) == ([True], 30)
    store.forget(b"mine", "four")
    assert store.bytes == 30


async def test_stored_responses_stay_below_their_cap() -> None:
    async with serving(response_memory=8000) as served, client_of(served) as client:
        ids = [(await client.responses.create(model="fake", input="a")).id for _ in range(20)]
        responses = served.responses
        assert 4000 < responses.bytes <= 8000
        assert 1 <= len(responses) < 20
        assert (await client.responses.retrieve(ids[-1])).output_text == REPLY
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[0])


@not_through_router
async def test_metrics_of_stored_responses() -> None:
    async with serving() as served, client_of(served) as client:
        _, session = await served.post("/v1/sessions", {})
        await client.responses.create(model="fake", input="a", conversation=session["id"])
        served.ring.held = True
        await client.responses.create(model="fake", input="b", background=True)
        async with served.client.get("/server_info") as response:
            info = await response.json()
        async with served.client.get("/metrics") as response:
            figures = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
    assert (info["sessions"]["open"], info["responses"]["stored"], info["responses"]["running"]) == (1, 2, 1)
    assert info["sessions"]["bytes"] > 0 and info["responses"]["bytes"] > 0
    for name, value in (
        ("session_memory_bytes", info["sessions"]["bytes"]),
        ("responses_stored", 2),
        ("responses_running", 1),
        ("responses_bytes", info["responses"]["bytes"]),
    ):
        assert float(figures[f'baton:{name}{{model_name="fake"}}']) == value


def texts(items: Any) -> list[tuple[str, str]]:
    return [(item.role, item.content[0].text) for item in items]


async def test_input_items_in_pages() -> None:
    async with serving(max_model_len=2000) as served, client_of(served) as client:
        messages: Any = [{"role": "user", "content": text} for text in "abcde"]
        response = await client.responses.create(model="fake", input=messages, instructions="Not an item.")
        listed = client.responses.input_items.list
        page = await listed(response.id, limit=2)
        assert (texts(page.data), page.has_more) == ([("user", "e"), ("user", "d")], True)
        assert [text async for _, text in both(listed(response.id, limit=2, order="asc"))] == list("abcde")
        page = await listed(response.id, after=page.data[-1].id)
        assert (texts(page.data), page.has_more) == ([("user", "c"), ("user", "b"), ("user", "a")], False)
        for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await listed(response.id, **query)
            assert caught.value.param == next(iter(query))
        with pytest.raises(openai.NotFoundError):
            await listed("resp_none")


async def both(pages: Any) -> AsyncIterator[tuple[str, str]]:
    async for item in pages:
        yield item.role, item.content[0].text


async def test_input_items_begin_with_the_context() -> None:
    async with serving(max_model_len=2000) as served, client_of(served) as client:
        first = await client.responses.create(model="fake", input="a", max_output_tokens=2)
        second = await client.responses.create(model="fake", input="b", previous_response_id=first.id)
        page = await client.responses.input_items.list(second.id, order="asc")
        assert texts(page.data) == [("user", "a"), ("assistant", "He"), ("user", "b")]
        assert page.data[1].id == first.output[0].id
        _, session = await served.post("/v1/sessions", {})
        for text in "xy":
            last = await client.responses.create(model="fake", input=text, conversation=session["id"])
        page = await client.responses.input_items.list(last.id, order="asc")
        assert texts(page.data) == [("user", "x"), ("assistant", REPLY), ("user", "y")]


async def test_a_response_that_only_feeds() -> None:
    async with serving(max_model_len=2000) as served, client_of(served) as client:
        more: Any = {"extra_body": {"generate": False}}
        fed = await client.responses.create(model="fake", input="a", instructions="One.", **more)
        assert (fed.status, fed.output, fed.usage and fed.usage.output_tokens) == ("completed", [], 0)
        events = [e.type async for e in await client.responses.create(model="fake", input="a", stream=True, **more)]
        assert events == ["response.created", "response.in_progress", "response.completed"]
        await client.responses.create(model="fake", input="b", previous_response_id=fed.id)
        sent = [bytes(request.tokens[::4]) for request in served.ring.submitted()]
        assert (sent[0], sent[-1]) == (b"system:One.\nuser:a\n", b"user:a\nuser:b\nassistant:")
        _, session = await served.post("/v1/sessions", {})
        for text, generate in (("c", False), ("d", True)):
            await client.responses.create(
                model="fake", input=text, conversation=session["id"], extra_body={"generate": generate}
            )
        assert bytes(served.ring.submitted()[-1].tokens[::4]) == b"user:c\nuser:d\nassistant:"
