"""Anthropic's Messages with the official client, which gets what the model writes, streamed or not."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from jiter import from_json
from llguidance import LLMatcher

from baton.actors.requests import Request
from baton.actors.tokens import unpack
from baton.api.anthropic.blocks import completed
from baton.api.generation.structured import GrammarCompiler
from tests.api.fake_ring import AGENT, Served, serving
from tests.api.generation.test_structured import TEXT

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}
NOW: Any = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
SHOWN = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "K", "days": [1, {"a": "unti'


@asynccontextmanager
async def client(reply: str = "", **options: Any) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Served]]:
    async with (
        serving(formats=AGENT, max_model_len=4000, **options) as served,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as api,
    ):
        served.ring.reply = reply
        model = served.server.ready()
        served.server.model = replace(model, grammars=GrammarCompiler(TEXT.grammars(model.vocab_size)))
        yield api, served


async def create(api: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    answer = await api.messages.create(**{"model": "fake", "messages": HELLO, "max_tokens": 2000, **fields})
    assert isinstance(answer, Message)
    return answer


async def streamed(api: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    async with api.messages.stream(**{"model": "fake", "messages": HELLO, "max_tokens": 2000, **fields}) as stream:
        return await stream.get_final_message()


def outline(answer: Message) -> list[Any]:
    """Return the blocks of an answer, without random ids and signatures, followed by the stop reason."""
    shown: list[Any] = []
    for block in answer.content:
        match block.type:
            case "text":
                shown.append(block.text)
            case "thinking":
                assert len(block.signature) == 64
                shown.append(("thinks", block.thinking))
            case "tool_use":
                assert block.id.startswith("toolu_")
                shown.append((block.name, block.input))
            case _:
                raise AssertionError(block)
    return [*shown, answer.stop_reason]


def last(served: Served) -> Request:
    return served.ring.submitted()[-1]


def last_prompt(served: Served) -> str:
    return bytes(unpack(last(served).tokens)).decode()


KOELN = ("weather", {"city": "Köln"})
REPLIES: dict[str, tuple[str, list[Any]]] = {
    "text": ("Hello.", ["Hello.", "end_turn"]),
    "nothing": ("", ["end_turn"]),
    "thought": (THOUGHT + "Hello.", [("thinks", "Hm."), "Hello.", "end_turn"]),
    "call": (CALL, [KOELN, "tool_use"]),
    "two": (THOUGHT + "I look." + CALL + SECOND, [("thinks", "Hm."), "I look.", KOELN, ("now", {}), "tool_use"]),
    "cut": (CUT, [("weather", {"city": "K", "days": [1, {}]}), "end_turn"]),
    "cut early": ('<tool_call>{"name": "now", "arguments": {', [("now", {}), "end_turn"]),
    "text between": (CALL + "And." + SECOND, [KOELN, "And.", ("now", {}), "tool_use"]),
    "broken": ("<tool_call>{name}</tool_call>", ["<tool_call>{name}</tool_call>", "end_turn"]),
}


@pytest.mark.parametrize("reply, expected", REPLIES.values(), ids=REPLIES)
async def test_an_answer_is_the_same_streamed_and_not(reply: str, expected: list[Any]) -> None:
    async with client(reply) as (api, served):
        served.ring.cached = 3
        answer = await create(api, tools=[WEATHER, NOW])
        assert outline(answer) == expected
        assert answer.id.startswith("msg_") and (answer.role, answer.type, answer.model) == (
            "assistant",
            "message",
            "fake",
        )
        thought = reply.index("</think>") + len("</think>") if "<think>" in reply else 0
        usage = answer.usage.to_dict()
        assert usage == {
            "input_tokens": last(served).prompt_len - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(reply.encode()) + 1,
            "output_tokens_details": {"thinking_tokens": thought},
        }
        for pause in (0.0, 0.001):
            served.ring.pause = pause
            again = await streamed(api, tools=[WEATHER, NOW])
            assert outline(again) == expected and again.usage.to_dict() == usage
        served.ring.miss_reason = "evicted"
        assert (await create(api, tools=[WEATHER, NOW])).usage.to_dict() == usage | {"lost": "evicted"}


async def test_events_of_a_stream() -> None:
    async with client(THOUGHT + "Hi" + CALL) as (_, served):
        served.ring.pause = 0.001
        body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 2000, "stream": True}
        async with served.client.post("/v1/messages", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = read(await response.text())
    kinds = [(each["type"], each.get("index"), each.get("delta", {}).get("type")) for each in events]
    shortened = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    assert shortened == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    begun = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert begun[:2] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    assert begun[2] | {"id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    assert events[0]["message"]["stop_reason"] is None and events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert kinds.count(("content_block_delta", 2, "input_json_delta")) > 5


def read(text: str) -> list[Any]:
    """Return the data of each event in a stream; check that the event's name is the type in its data."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_pings() -> None:
    async with client("Hi", ping_interval=0.01) as (api, served):
        served.ring.held = True
        body = {"messages": HELLO, "max_tokens": 9, "stream": True}
        async with served.client.post("/v1/messages", json=body) as response:
            begun = b""
            while begun.count(b"event: ping\n") < 2:
                begun += await response.content.readany()
            served.ring.release()
            events = read((begun + await response.read()).decode())
        assert {"type": "ping"} in events and events[-1] == {"type": "message_stop"}
        served.ring.cached, served.ring.held = 2, True
        stream = await api.messages.create(model="fake", messages=HELLO, max_tokens=9, stream=True)
        served.ring.release()
        usages = [event.usage async for event in stream if event.type == "message_delta"]
    assert [usage.cache_read_input_tokens for usage in usages] == [2]


async def test_why_an_answer_ended() -> None:
    async with client("one two three") as (api, served):
        assert outline(await create(api, max_tokens=3)) == ["one", "max_tokens"]
        more = {"temperature": 0.5, "top_p": 0.5, "top_k": 5}
        await create(api, stop_sequences=["two", "x"], extra_body=more)
        request = last(served)
        assert request.stops.strings == ("two", "x")
        assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.5, 5)


async def test_a_prompt_may_be_computed_ahead() -> None:
    async with client("Hello") as (api, served):
        for answer in (await create(api, max_tokens=0), await streamed(api, max_tokens=0)):
            assert outline(answer) == ["max_tokens"] and answer.usage.output_tokens == 0
            assert last(served).stops.max_tokens == 1


async def test_an_aborted_answer_ends_with_max_tokens() -> None:
    async with client("Hello " * 50) as (api, served):
        served.ring.pause = 0.001
        async with api.messages.stream(model="fake", messages=HELLO, max_tokens=900) as stream:
            async for _ in stream.text_stream:
                status, answer = await served.post("/abort_request", {"rid": last(served).id})
                assert status == 200, answer
            final = await stream.get_final_message()
    assert final.id == last(served).id and final.stop_reason == "max_tokens"
    assert final.content[0].type == "text" and final.content[0].text.startswith("H")


async def test_a_whole_conversation_reaches_the_template() -> None:
    async with client("Fine.") as (api, served):
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "clock"}],
                    },
                    {"type": "tool_result", "tool_use_id": "toolu_3"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
        system: Any = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]
        answer = await create(api, messages=messages, system=system)
        assert outline(answer) == ["Fine.", "end_turn"]
        assert last_prompt(served) == (
            "system:Be\nkind.\nuser:a\nb\nc\n<CALLS>tool:rain\ntool:Error: no\nclock\ntool:\nuser:And?\nassistant:"
        ).replace(
            "<CALLS>",
            'assistant:<think>Hm.</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "K\\u00f6ln"}}'
            '</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        )
        await create(api, messages=HELLO, system="Be brief.")
        assert last_prompt(served) == "system:Be brief.\nuser:Hi\nassistant:"


async def test_an_answer_is_sent_back_unchanged() -> None:
    async with client(THOUGHT + "I look." + CALL) as (api, served):
        for answer in (await create(api, tools=[WEATHER]), await streamed(api, tools=[WEATHER])):
            call = answer.content[-1]
            assert call.type == "tool_use"
            result: Any = {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}],
            }
            reply: Any = {"role": "assistant", "content": answer.content}
            await create(api, messages=[*HELLO, reply, result], tools=[WEATHER])
            prompt = last_prompt(served)
            assert prompt.startswith(
                f"tools:{json.dumps([SHOWN])}\nuser:Hi\nassistant:<think>Hm.</think>I look.<tool_call>"
            )
            assert prompt.endswith("</tool_call>\ntool:rain\nassistant:")


async def test_the_billing_line_is_removed() -> None:
    """Claude Code begins its system prompt with a billing line that changes. With it, no prompt would be cached."""
    billing = "x-anthropic-billing-header: cc_version=2.1.36; cch=1d3;"
    rules: Any = [{"type": "text", "text": text} for text in (billing, "You are an agent.")]
    async with client("Fine.") as (api, served):
        for system in (rules, f"{billing}\nYou are an agent."):
            await create(api, messages=HELLO, system=system)
            assert last_prompt(served) == "system:You are an agent.\nuser:Hi\nassistant:"
        await create(api, messages=HELLO, system=billing)
        assert last_prompt(served) == "user:Hi\nassistant:"


async def test_a_final_message_of_the_assistant_is_continued() -> None:
    async with client(" is it.") as (api, served):
        chat: Any = [*HELLO, {"role": "assistant", "content": "That"}]
        assert outline(await create(api, messages=chat)) == [" is it.", "end_turn"]
        assert last_prompt(served) == "user:Hi\nassistant:That"


async def test_choices() -> None:
    async with client(CALL + SECOND) as (api, served):

        async def ask(**more: Any) -> tuple[list[Any], str]:
            return outline(await create(api, tools=[WEATHER, NOW], **more)), last(served).grammar

        both = [KOELN, ("now", {}), "tool_use"]
        assert await ask() == await ask(tool_choice={"type": "auto"}) == (both, "")
        assert await ask(tool_choice={"type": "none"}) == ([CALL + SECOND, "end_turn"], "")
        assert "weather" in last_prompt(served)
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        assert await ask(tool_choice=alone) == ([KOELN, "tool_use"], "")
        for choice, names in (
            ({"type": "any"}, {"weather", "now"}),
            ({"type": "tool", "name": "now"}, {"now"}),
            ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "now"}),
        ):
            _, grammar = await ask(tool_choice=choice)
            assert LLMatcher.validate_grammar(grammar) == ""
            assert {name for name in ("weather", "now") if f'\\"{name}\\"' in grammar} == names


async def test_an_answer_may_have_to_follow_a_schema() -> None:
    async with client('{"city": "Rom"}') as (api, served):
        format: Any = {"type": "json_schema", "schema": SCHEMA}
        answer = await create(api, output_config={"format": format})
        assert outline(answer) == ['{"city": "Rom"}', "end_turn"]
        grammar = last(served).grammar
        assert "city" in grammar and LLMatcher.validate_grammar(grammar) == ""
        await create(api, output_config={"format": format}, tools=[WEATHER])
        assert "<tool_call>" in last(served).grammar and "<tool_call>" not in grammar


async def test_thinking_is_turned_on_and_off() -> None:
    async with client("Hm.</think>Yes.") as (api, served):
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}):
            answer = await create(api, thinking=thinking)
            assert last_prompt(served).endswith("assistant:<think>")
            assert (
                outline(answer)
                == outline(await streamed(api, thinking=thinking))
                == [("thinks", "Hm."), "Yes.", "end_turn"]
            )
        for fields in ({"thinking": {"type": "disabled"}}, {}):
            answer = await create(api, output_config={"effort": "high"}, **fields)
            assert last_prompt(served).endswith("assistant:")
            assert outline(answer) == ["Hm.</think>Yes.", "end_turn"]


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


async def test_marks_are_checkpoints() -> None:
    async with client("Hi") as (api, served):
        system: Any = [{"type": "text", "text": "One.", **MARK}, {"type": "text", "text": "Two."}]
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [{"type": "text", "text": "d", **MARK}]},
        ]
        fields: Any = {"messages": messages, "system": system, "tools": [{**WEATHER, **MARK}, NOW]}
        answer = await create(api, **fields)
        prompt = last_prompt(served)
        assert prompt.endswith("\nsystem:One.\nTwo.\nuser:a\nb\nassistant:c\nuser:d\nassistant:")
        tools, *ends = [prompt[:end] for end in last(served).checkpoints]
        assert tools == f"tools:[{json.dumps(SHOWN)}"
        assert [prompt.removeprefix(end) for end in ends] == [
            "Two.\nuser:a\nb\nassistant:c\nuser:d\nassistant:", "b\nassistant:c\nuser:d\nassistant:", "assistant:"
        ]  # fmt: skip
        created = len(prompt) - len("assistant:")
        assert answer.usage.cache_creation_input_tokens == created
        assert answer.usage.input_tokens == len("assistant:")
        served.ring.cached = created + 2
        usage = (await streamed(api, **fields)).usage
        counts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
        assert counts == (len("assistant:") - 2, 0, created + 2)
        served.ring.cached = 0
        usage = (await create(api, cache_control={"type": "ephemeral"})).usage
        assert (usage.input_tokens, usage.cache_creation_input_tokens) == (len("assistant:"), len("user:Hi\n"))


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_cut_object_is_completed_as_by_the_client(cut: int) -> None:
    json_text = '{"a": [1, {"b": "x,\\" }", "c": null}, true], "é": {"d": -1.5e3, "f": [[], {}]}, "g" : 12}'[:cut]
    whole = completed(json_text)
    assert json.loads(whole) == from_json(json_text.encode(), partial_mode=True)
