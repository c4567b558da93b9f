"""Tools and reasoning in chat completions: the official client gets what the model writes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion

from baton.actors.tokens import unpack
from tests.api.fake_ring import AGENT, FakeText, Served, payloads, read_events, serving

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
CUT = '<tool_call>\n{"name": "weather", "arguments": {"ci'


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


Outline = tuple[str | None, str | None, list[tuple[str, str]], str | None]


def outline(answer: ChatCompletion, index: int = 0) -> Outline:
    choice = answer.choices[index]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or () if call.function]
    return choice.message.content, getattr(choice.message, "reasoning_content", None), calls, choice.finish_reason


async def streamed(api: openai.AsyncOpenAI, index: int = 0, **fields: Any) -> tuple[Outline, list[str], int]:
    """Return the joined deltas of one choice of a stream, the ids of its calls, and the usage's reasoning tokens."""
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    content, reasoning, calls, ids, finish, thought = "", "", list[list[str]](), list[str](), None, -1
    async for chunk in await api.chat.completions.create(model="fake", **fields):
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            thought = chunk.usage.completion_tokens_details.reasoning_tokens or 0
        for choice in (choice for choice in chunk.choices if choice.index == index):
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function" and call.function.name
                    ids.append(call.id)
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    named = [(name, arguments) for name, arguments in calls]
    return (content or (None if calls else ""), reasoning or None, named, finish), ids, thought


KOELN = ("weather", '{"city": "Köln"}')
REPLIES: dict[str, tuple[str, Outline]] = {
    "text": ("Hello.", ("Hello.", None, [], "stop")),
    "nothing": ("", ("", None, [], "stop")),
    "thought": (THOUGHT + "Hello.", ("Hello.", "Hm.", [], "stop")),
    "call": (CALL, (None, None, [KOELN], "tool_calls")),
    "two": (THOUGHT + "I look." + CALL + SECOND, ("I look.", "Hm.", [KOELN, ("now", "{}")], "tool_calls")),
    "cut": (CUT, (None, None, [("weather", '{"ci')], "stop")),
    "broken": ("<tool_call>{name}</tool_call>", ("<tool_call>{name}</tool_call>", None, [], "stop")),
}


@pytest.mark.parametrize("reply, expected", REPLIES.values(), ids=REPLIES)
async def test_an_answer_is_the_same_streamed_and_not(reply: str, expected: Outline) -> None:
    async with client(reply) as (api, served):
        fields: Any = {"messages": HELLO, "tools": [WEATHER, NOW]}
        answer = await api.chat.completions.create(model="fake", n=2, **fields)
        assert outline(answer) == outline(answer, 1) == expected
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        thought = reply.index("</think>") + len("</think>") if expected[1] else 0
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * thought
        for pause in (0.0, 0.001):
            served.ring.pause = pause
            assert (await streamed(api, **fields))[0] == expected
        assert (await streamed(api, 1, **fields, n=2))[::2] == (expected, 2 * thought)


async def test_calls_of_different_choices_have_different_ids() -> None:
    async with client(CALL + SECOND) as (api, _):
        _, ids, _ = await streamed(api, messages=HELLO, tools=[WEATHER, NOW], n=2)
        answer = await api.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER, NOW])
    ids += [call.id for call in answer.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == 4


async def test_arguments_are_streamed_as_they_come() -> None:
    async with client(CALL) as (_, served):
        served.ring.pause = 0.001
        body = {"messages": HELLO, "tools": [WEATHER], "stream": True}
        async with served.client.post("/v1/chat/completions", json=body) as response:
            chunks = payloads(await read_events(response))
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    [first, *others] = [call for [call] in filter(None, calls)]
    assert first["index"] == 0 and first["function"] == {"name": "weather", "arguments": "{"}
    assert len(others) > 5 and all(set(call) == {"index", "function"} for call in others)
    assert chunks[-1]["choices"][0] | {"stop_reason": 0} == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls", "stop_reason": 0,
    }  # fmt: skip


async def test_a_result_goes_back_to_the_model() -> None:
    async with client(CALL) as (api, served):
        tools: Any = [WEATHER]
        answer = await api.chat.completions.create(model="fake", messages=HELLO, tools=tools)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        served.ring.reply = "Rain."
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        again = await api.chat.completions.create(model="fake", messages=[*HELLO, message, result], tools=tools)
        shown = f"tools:{json.dumps(tools)}\n"
        assert last_prompt(served) == (
            f'{shown}user:Hi\nassistant:<tool_call>{{"name": "weather", "arguments": {json.dumps({"city": "Köln"})}}}'
            "</tool_call>\ntool:rain\nassistant:"
        )
        assert len(served.ring.submitted()[-1].message_ends) == 3
    assert outline(again)[0] == "Rain."


async def test_choices() -> None:
    async with client(CALL + SECOND) as (api, served):

        async def ask(**more: Any) -> tuple[Outline, str]:
            answer = await api.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER, NOW], **more)
            return outline(answer), served.ring.submitted()[-1].grammar

        assert await ask(tool_choice="none") == ((CALL + SECOND, None, [], "stop"), "")
        assert "weather" in last_prompt(served)
        assert await ask(tool_choice="auto") == await ask()
        assert (await ask())[1] == ""
        assert (await ask(parallel_tool_calls=False))[0][2] == [KOELN]
        for choice, names in (
            ("required", {"weather", "now"}),
            ({"type": "function", "function": {"name": "now"}}, {"now"}),
            (allowed("required", "weather"), {"weather"}),
            (allowed("auto", "now"), {"now"}),
        ):
            _, grammar = await ask(tool_choice=choice)
            assert LLMatcher.validate_grammar(grammar) == ""
            assert {name for name in ("weather", "now") if f'\\"{name}\\"' in grammar} == names


async def test_parts_of_a_text_are_joined_as_the_template_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with client("Fine.") as (api, served):
        for between in ("", "\n"):
            monkeypatch.setattr(FakeText, "between_parts", between)
            await api.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
            assert last_prompt(served) == f"user:a{between}b\nassistant:"


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_calls_of_strict_tools_follow_their_schema() -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with client(CALL) as (api, served):
        await api.chat.completions.create(model="fake", messages=HELLO, tools=[strict, NOW])
        [request] = served.ring.submitted()
        assert "strict" not in last_prompt(served)
    assert LLMatcher.validate_grammar(request.grammar) == "" and '\\"now\\"' in request.grammar


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": 3}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", "weather")}, "tool_choice.mode"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice.tools"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [WEATHER["function"]]}, "functions"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], param: str) -> None:
    async with client() as (_, served):
        status, error = await served.error("/v1/chat/completions", {"messages": HELLO, **body})
        assert (status, error["param"]) == (400, param)
        assert served.ring.submitted() == []


async def test_a_model_without_tools_refuses_them() -> None:
    async with serving() as served:
        status, error = await served.error("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER]})
        assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")


async def test_reasoning_is_turned_on_and_off() -> None:
    async with client("Hm.</think>Yes.") as (api, served):
        answer = await api.chat.completions.create(model="fake", messages=HELLO, reasoning_effort="high")
        assert last_prompt(served).endswith("assistant:<think>")
        assert outline(answer) == ("Yes.", "Hm.", [], "stop")
        assert (await streamed(api, messages=HELLO, reasoning_effort="low"))[0] == ("Yes.", "Hm.", [], "stop")
        answer = await api.chat.completions.create(model="fake", messages=HELLO, reasoning_effort="none")
        assert last_prompt(served).endswith("assistant:")
        assert outline(answer) == ("Hm.</think>Yes.", None, [], "stop")


async def test_logprobs_are_of_all_tokens() -> None:
    async with client(THOUGHT + CALL) as (api, _):
        fields: Any = {"model": "fake", "messages": HELLO, "tools": [WEATHER], "logprobs": True}
        answer = await api.chat.completions.create(**fields)
        chunks = [chunk async for chunk in await api.chat.completions.create(**fields, stream=True)]
    whole = answer.choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole is not None and whole.content is not None
    assert len(whole.content) == len((THOUGHT + CALL).encode()) + 1
    assert [item.token for part in parts if part for item in part.content or ()] == [i.token for i in whole.content]


async def test_calls_that_cannot_fit_are_refused_before_they_are_rendered() -> None:
    async with client() as (_, served):
        served.server.ready().text.max_token_bytes = 1  # type: ignore[misc]
        huge = {"id": "c", "type": "function", "function": {"name": "a", "arguments": json.dumps({"a": "x" * 100_000})}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [huge]}]
        status, error = await served.error("/v1/chat/completions", {"messages": messages})
        assert (status, error["code"]) == (400, "context_length_exceeded") and "at least" in error["message"]
