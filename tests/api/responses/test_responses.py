"""/v1/responses with the official client, and raw requests for what that client does not show."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton.actors import tokens
from tests.api.fake_ring import Served, serving

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
KINDS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip


@asynccontextmanager
async def client_of(served: Served, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key=key, max_retries=0) as client:
        yield client


def last_prompt(served: Served) -> bytes:
    return bytes(i for i in tokens.unpack(served.ring.submitted()[-1].tokens) if i < 256)


async def test_a_response() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.cached = 3
        response = await client.responses.create(
            model="fake", input="hi", instructions="Be brief.", temperature=0.5, top_p=0.9, metadata={"a": "b"}
        )
        [request] = served.ring.submitted()
        assert await client.responses.retrieve(response.id) == response
        prompt, served.ring.miss_reason = last_prompt(served), "evicted"
        later = await client.responses.create(model="fake", input="hi")
    assert prompt == b"system:Be brief.\nuser:hi\nassistant:"
    assert (response.status, response.output_text, response.model) == ("completed", REPLY, "fake")
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.input_tokens_details.to_dict() == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert later.usage is not None and later.usage.input_tokens_details.to_dict()["lost"] == "evicted"
    assert response.usage.output_tokens == len(REPLY.encode()) + 1
    assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"a": "b"}, True)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)


async def test_the_events_of_a_stream() -> None:
    async with serving() as served, client_of(served) as client:
        stream = await client.responses.create(model="fake", input="hi", stream=True)
        events = [event async for event in stream]
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == KINDS
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert await client.responses.retrieve(final.id) == final
        async with client.responses.stream(model="fake", input="hi", previous_response_id=final.id) as helped:
            text = "".join([event.delta async for event in helped if event.type == "response.output_text.delta"])
            assert text == (await helped.get_final_response()).output_text == REPLY
    assert last_prompt(served) == f"user:hi\nassistant:{REPLY}\nuser:hi\nassistant:".encode()


async def test_a_conversation_and_its_branches() -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        first = await client.responses.create(model="fake", input="a", instructions="One.", max_output_tokens=2)
        assert (first.status, first.output_text) == ("incomplete", "He")
        assert first.incomplete_details is not None and first.incomplete_details.reason == "max_output_tokens"
        second = await client.responses.create(model="fake", input="b", previous_response_id=first.id)
        assert last_prompt(served) == b"user:a\nassistant:He\nuser:b\nassistant:"
        assert second.previous_response_id == first.id
        items: Any = [*second.output, {"role": "developer", "content": [{"type": "input_text", "text": "c"}]}]
        await client.responses.create(model="fake", input=items, previous_response_id=first.id, store=False)
        assert last_prompt(served) == f"user:a\nassistant:He\nassistant:{REPLY}\nsystem:c\nassistant:".encode()
        await client.responses.delete(first.id)
        await client.responses.create(model="fake", input="d", previous_response_id=second.id)
        expected = f"user:a\nassistant:He\nuser:b\nassistant:{REPLY}\nuser:d\nassistant:"
        assert last_prompt(served) == expected.encode()


async def test_unknown_responses() -> None:
    async with (
        serving(api_key=("one", "two")) as served,
        client_of(served, "one") as one,
        client_of(served, "two") as two,
    ):
        unstored = await one.responses.create(model="fake", input="a", store=False)
        stored = await one.responses.create(model="fake", input="a")
        gone = await one.responses.create(model="fake", input="a")
        await one.responses.delete(gone.id)
        for client, id in ((one, "resp_none"), (one, unstored.id), (one, gone.id), (two, stored.id)):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="fake", input="b", previous_response_id=id)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
            for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(id)
        assert (await one.responses.retrieve(stored.id)).id == stored.id


async def test_retention() -> None:
    async with serving(response_retention=0.1) as served, client_of(served) as client:
        response = await client.responses.create(model="fake", input="a")
        await asyncio.sleep(0.15)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    async with serving(response_retention=0) as served, client_of(served) as client:
        response = await client.responses.create(model="fake", input="a")
        assert response.model_dump()["store"] is False and len(served.responses) == 0


async def test_cancel_keeps_the_text_so_far() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.pause = 0.02
        stream = await client.responses.create(model="fake", input="a", stream=True)
        events = aiter(stream)
        id = (await anext(events)).response.id
        assert (await client.responses.retrieve(id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="b", previous_response_id=id)
        assert caught.value.code == "previous_response_in_progress"
        cancelled = await client.responses.cancel(id)
        last = [event async for event in events][-1]
        assert last.type == "response.incomplete"
        assert last.response.status == cancelled.status == "cancelled"
        served.ring.pause = 0
        await client.responses.create(model="fake", input="b", previous_response_id=id)
        assert last_prompt(served) == f"user:a\nassistant:{cancelled.output_text}\nuser:b\nassistant:".encode()
        assert (await client.responses.cancel(id)).status == "cancelled"


async def test_a_client_that_leaves() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.pause = 0.02
        async with await client.responses.create(model="fake", input="a", stream=True) as stream:
            id = (await anext(aiter(stream))).response.id
        await served.ring.until(served.ring.aborted)
        for _ in range(100):
            if (response := await client.responses.retrieve(id)).status != "in_progress":
                break
            await asyncio.sleep(0.01)
        assert response.status == "cancelled" and REPLY.startswith(response.output_text)


async def test_failures() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.refusal = "queue_full"
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="fake", input="a")
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="fake", input="a", stream=True)
        assert len(served.responses) == 0
        served.ring.refusal, served.ring.failing = None, True
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="fake", input="a")
    async with serving(request_timeout=0.2, ping_interval=0.05) as served, client_of(served) as client:
        served.ring.held = True
        events = [event async for event in await client.responses.create(model="fake", input="a", stream=True)]
        assert [events[0].type, events[-1].type] == ["response.created", "response.failed"]
        failed = events[-1].response
        assert failed.error is not None and str(failed.error.code) == "request_timeout"
        assert (await client.responses.retrieve(failed.id)).status == "failed"


async def test_log_probabilities() -> None:
    async with serving() as served, client_of(served) as client:
        response = await client.responses.create(
            model="fake", input="a", top_logprobs=2, include=["message.output_text.logprobs"], max_output_tokens=3
        )
        part: Any = response.output[0]
        assert [info.token for info in part.content[0].logprobs] == ["H", "e", "l"]
        assert len(part.content[0].logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "custom"}]), ("conversation", {"name": "c"}), ("after", 1), ("truncation", "some"),
        ("text", {"format": {"type": "json_object"}}), ("nonsense", 1),
        ("reasoning", {"effort": "huge"}), ("reasoning", {"force": 1}),
        ("input", []), ("input", [{"type": "item_reference"}]), ("input", [{"type": "item", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("input", [{"role": {"a": 1}, "content": "a"}]), ("input", [{"role": "user", "content": [{"type": {}}]}]),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(field: str, value: Any) -> None:
    async with serving() as served:
        status, error = await served.error("/v1/responses", {"input": "a", field: value})
        assert status == 400 and error["param"].startswith(field)


async def test_fields_without_effect_are_accepted() -> None:
    async with serving() as served:
        body = {
            "input": "a", "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": None, "summary": None}, "background": False, "user": "me", "truncation": "disabled",
            "service_tier": "auto", "parallel_tool_calls": True, "ignore_eos": True, "min_tokens": 1, "seed": 1,
        }  # fmt: skip
        assert (await served.post("/v1/responses", body))[0] == 200


@pytest.mark.parametrize(
    ("events", "seed", "error"),
    [(10**14, 1, "have no 100000000000000 events"), (-1, 1, "have no -1 events"), (2, 2**64, "the seeds cannot be")],
)
async def test_a_resumption_that_no_engine_can_have_begun_is_refused(events: int, seed: int, error: str) -> None:
    begun = {"event": "begun", "ids": ["resp_" + "a" * 32], "seeds": [seed], "limits": [4], "weights": ""}
    resume = {"begun": begun, "parts": [[0, "AQAAAA==", 1, False]], "events": events}
    async with serving() as served:
        body = {"input": "hi", "stream": True, "max_output_tokens": 4, "baton_resume": resume}
        status, answer = await served.error("/v1/responses", body)
    assert status == 400 and error in answer["message"]
