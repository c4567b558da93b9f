"""Function calls and reasoning in responses, with the official client: streamed, stored, continued."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from openai.types.responses import Response

from baton.actors.tokens import unpack
from tests.api.fake_ring import AGENT, Served, serving

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "description": "Tells.", "parameters": SCHEMA}
SHOWN = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
WRITTEN = f'<tool_call>{{"name": "weather", "arguments": {json.dumps({"city": "Köln"})}}}</tool_call>'


@asynccontextmanager
async def client(reply: str = "", **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with (
        serving(formats=AGENT, max_model_len=4000, **options) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as api,
    ):
        served.ring.reply = reply
        yield api, served


def last_prompt(served: Served) -> str:
    return bytes(unpack(served.ring.submitted()[-1].tokens)).decode()


def outline(response: Response) -> list[tuple[str, ...]]:
    """Return each item of the output as a short tuple."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        match item.type:
            case "message":
                [part] = item.content
                assert part.type == "output_text"
                found.append(("message", part.text))
            case "reasoning":
                assert item.content is not None
                found.append(("reasoning", item.content[0].text))
            case "function_call":
                found.append(("call", item.name, item.arguments, item.status or ""))
    return found


KOELN = ("call", "weather", '{"city": "Köln"}', "completed")
REPLIES: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "text": ("Hello.", [("message", "Hello.")]),
    "nothing": ("", [("message", "")]),
    "thought": (THOUGHT + "Hello.", [("reasoning", "Hm."), ("message", "Hello.")]),
    "call": (CALL, [KOELN]),
    "all": (
        THOUGHT + "I look." + CALL + "\n" + CALL + "So.",
        [("reasoning", "Hm."), ("message", "I look."), KOELN, KOELN, ("message", "So.")],
    ),
    "only thought": ("<think>Hm", [("reasoning", "Hm")]),
    "cut": (CALL[:50], [("call", "weather", '{"city"'[: 50 - CALL.index('{"city')], "incomplete")]),
}


@pytest.mark.parametrize("pause", [0.0, 0.001])
@pytest.mark.parametrize("reply, expected", REPLIES.values(), ids=REPLIES)
async def test_a_response_is_the_same_streamed_and_not(
    reply: str, expected: list[tuple[str, ...]], pause: float
) -> None:
    async with client(reply) as (api, served):
        served.ring.pause = pause
        fields: Any = {"model": "fake", "input": "hi", "tools": [WEATHER]}
        whole = await api.responses.create(**fields)
        assert outline(whole) == expected and whole.status == "completed"
        events = [event async for event in await api.responses.create(**fields, stream=True)]
        final = await api.responses.retrieve(events[-1].response.id)  # type: ignore[union-attr]
        assert outline(final) == expected
        assert [event.sequence_number for event in events] == list(range(len(events)))
        check_events(events, final)
        assert [event async for event in await api.responses.retrieve(final.id, stream=True)] == events
        async with api.responses.stream(**fields) as stream:
            assert outline(await stream.get_final_response()) == expected
        ids = [item.id for item in final.output]
        assert len(set(ids)) == len(ids)


def check_events(events: list[Any], final: Response) -> None:
    """Check that events open each item, fill it with deltas that add up to it, and close it before the next item."""
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in own]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert events.index(own[-1]) - events.index(own[0]) == len(own) - 1
        assert own[-1].item == item
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        match item.type:
            case "message":
                middle, whole = "output_text", item.content[0].text  # type: ignore[union-attr]
            case "reasoning":
                middle, whole = "reasoning_text", item.content[0].text  # type: ignore[index]
            case _:
                middle, whole = "function_call_arguments", item.arguments  # type: ignore[union-attr]
        assert text == whole
        assert {f"{middle}.done", *([f"{middle}.delta"] if whole else [])} <= set(kinds)


async def test_reasoning_is_counted() -> None:
    async with client(THOUGHT + "Hello.") as (api, _):
        response = await api.responses.create(model="fake", input="hi")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>")


async def test_a_chain_continues_calls_and_their_results() -> None:
    async with client(THOUGHT + "I look." + CALL) as (api, served):
        fields: Any = {"model": "fake", "tools": [WEATHER]}
        first = await api.responses.create(input="Hi", instructions="Be brief.", **fields)
        call: Any = first.output[-1]
        served.ring.reply = "Rain."
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await api.responses.create(input=[result], previous_response_id=first.id, **fields)
        shown = (
            f"tools:{json.dumps([SHOWN])}\nuser:Hi\nassistant:<think>Hm.</think>I look.{WRITTEN}\ntool:rain\nassistant:"
        )
        assert last_prompt(served) == shown
        await api.responses.create(input=[{"role": "user", "content": "Hi"}, *first.output, result], **fields)  # type: ignore[list-item]
        assert last_prompt(served) == shown
        listed = (await api.responses.input_items.list(second.id, order="asc")).data
        assert [item.type for item in listed] == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call_output",
        ]
        assert [item.id for item in listed[1:4]] == [item.id for item in first.output]
        third = await api.responses.create(input="And?", previous_response_id=second.id, **fields)
        assert last_prompt(served) == shown + "Rain.\nuser:And?\nassistant:"
    assert third.tools[0].to_dict() == WEATHER and third.tool_choice == "auto"


async def test_input_may_reference_items_of_a_stored_response() -> None:
    async with client(THOUGHT + "I look." + CALL) as (api, served):
        first = await api.responses.create(model="fake", input="Hi", tools=[WEATHER])
        call = first.output[-1]
        assert call.type == "function_call"
        question: Any = {"role": "user", "content": "Hi"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        prompts = []
        for answer in (
            [item.to_dict() for item in first.output],
            [{"type": "item_reference", "id": item.id} for item in first.output],
            [{"id": item.id} for item in first.output],
        ):
            await api.responses.create(model="fake", input=[question, *answer, result], tools=[WEATHER])
            prompts.append(last_prompt(served))
            counted = await api.responses.input_tokens.count(model="fake", input=[question, *answer, result])
            assert counted.input_tokens > len("Hi")
        assert prompts[0] == prompts[1] == prompts[2] and "I look." in prompts[0] and "rain" in prompts[0]
        for unknown in ("msg_none", f"{call.id}9", "x"):
            with pytest.raises(openai.NotFoundError, match=r"no stored response has an item"):
                await api.responses.create(model="fake", input=[{"type": "item_reference", "id": unknown}])


async def test_a_call_that_was_cut_off_is_left_out_of_the_context() -> None:
    async with client("I look." + CALL[:50]) as (api, served):
        first = await api.responses.create(model="fake", input="Hi", tools=[WEATHER])
        await api.responses.create(model="fake", input="b", previous_response_id=first.id)
        assert last_prompt(served) == "user:Hi\nassistant:I look.\nuser:b\nassistant:"


async def test_a_conversation_keeps_calls() -> None:
    async with client(THOUGHT + CALL) as (api, served):
        _, session = await served.post("/v1/sessions", {})
        fields: Any = {"model": "fake", "tools": [WEATHER], "conversation": session["id"]}
        first = await api.responses.create(input="Hi", **fields)
        call: Any = first.output[-1]
        served.ring.reply = "Rain."
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await api.responses.create(input=[result], **fields)
        shown = f"tools:{json.dumps([SHOWN])}\nuser:Hi\nassistant:<think>Hm.</think>{WRITTEN}\ntool:rain\nassistant:"
        assert last_prompt(served) == shown
        listed: Any = (await api.responses.input_items.list(second.id, order="asc")).data
        assert [item.type for item in listed] == ["message", "reasoning", "function_call", "function_call_output"]
        assert listed[2].call_id == listed[3].call_id == call.call_id
        assert [item.id for item in listed[1:3]] == [item.id for item in first.output]


async def test_in_the_background() -> None:
    async with client(THOUGHT + CALL) as (api, _):
        response = await api.responses.create(model="fake", input="Hi", tools=[WEATHER], background=True)
        assert response.status == "queued"
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await api.responses.retrieve(response.id)
        assert outline(response) == [("reasoning", "Hm."), KOELN]
        events = [event async for event in await api.responses.retrieve(response.id, stream=True, starting_after=4)]
        assert events[0].sequence_number == 5 and events[-1].type == "response.completed"


async def test_over_the_websocket() -> None:
    async with client(THOUGHT + CALL) as (_, served), served.client.ws_connect("/v1/responses") as socket:

        async def create(**body: Any) -> dict[str, Any]:
            await socket.send_str(json.dumps({"type": "response.create", "tools": [WEATHER], **body}))
            events = [json.loads(await socket.receive_str())]
            while events[-1]["type"] != "response.completed":
                events.append(json.loads(await socket.receive_str()))
            kinds = {event["type"] for event in events}
            assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} <= kinds
            response: dict[str, Any] = events[-1]["response"]
            return response

        first = await create(input="Hi")
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "rain"}
        await create(input=[result], previous_response_id=first["id"])
        assert last_prompt(served).endswith(f"assistant:<think>Hm.</think>{WRITTEN}\ntool:rain\nassistant:")


async def test_choices_and_effort() -> None:
    async with client(CALL) as (api, served):
        fields: Any = {"model": "fake", "input": "hi", "tools": [WEATHER]}
        for choice in ("required", {"type": "function", "name": "weather"}):
            response = await api.responses.create(tool_choice=choice, **fields)
            grammar = served.ring.submitted()[-1].grammar
            assert "weather" in grammar and LLMatcher.validate_grammar(grammar) == ""
            assert response.to_dict()["tool_choice"] == choice
        response = await api.responses.create(tool_choice="none", parallel_tool_calls=False, **fields)
        assert (outline(response), response.parallel_tool_calls) == ([("message", CALL)], False)
        response = await api.responses.create(model="fake", input="hi", reasoning={"effort": "low", "summary": "auto"})
        assert last_prompt(served).endswith("assistant:<think>")
        assert response.reasoning is not None and response.reasoning.effort == "low"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": 'a"b', "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], param: str) -> None:
    async with client() as (_, served):
        status, error = await served.error("/v1/responses", {"input": "hi", **body})
        assert (status, error["param"]) == (400, param)
        assert served.ring.submitted() == []


async def test_the_tools_that_codex_sends() -> None:
    """Codex sends MCP tools in namespaces, a hosted search tool, and metadata about itself."""
    space = {"type": "namespace", "name": "mcp__sky__", "description": "Of the sky.", "tools": [WEATHER]}
    other = {**space, "name": "sea"}
    offered: Any = [{"type": "web_search", "external_web_access": True}, space, other]
    call = CALL.replace("weather", "mcp__sky__weather")
    async with client(call) as (api, served):
        body: Any = {"client_metadata": {"installation": "1"}}
        fields: Any = {"model": "fake", "input": "hi", "tools": offered, "extra_body": body}
        response = await api.responses.create(**fields)
        names = ("mcp__sky__weather", "sea__weather")
        shown = [{**SHOWN, "function": {**SHOWN["function"], "name": name}} for name in names]  # type: ignore[dict-item]
        assert last_prompt(served) == f"tools:{json.dumps(shown)}\nuser:hi\nassistant:"
        [item] = response.output
        assert item.type == "function_call" and (item.name, item.namespace) == ("weather", "mcp__sky__")
        events = [event async for event in await api.responses.create(**fields, stream=True)]
        assert {event.name for event in events if event.type == "response.function_call_arguments.done"} == {"weather"}
        await api.responses.create(**{**fields, "input": [{"role": "user", "content": "hi"}, item]})
        assert last_prompt(served).startswith(f"tools:{json.dumps(shown)}\nuser:hi\nassistant:")
        assert '{"name": "mcp__sky__weather", "arguments"' in last_prompt(served)


async def test_ids_begin_as_clients_expect() -> None:
    """langchain continues a response only if the response's id begins with resp_."""
    async with client(THOUGHT + "I look." + CALL) as (api, _):
        response = await api.responses.create(model="fake", input="hi", tools=[WEATHER])
    assert response.id.startswith("resp_")
    assert [item.id[:3] for item in response.output if item.id] == ["rs_", "msg", "fc_"]
