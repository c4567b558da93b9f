"""Messages and tools as clients send them, and as templates see them."""

from typing import Any

import pytest

from baton.api.errors import ApiError
from baton.api.generation.messages import read_message
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool, read_tool, read_tools
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.picking import OutputFormats
from tests.api.fake_ring import VOCAB, FakeText

pytestmark = pytest.mark.anyio
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
SHOWN = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def call(**function: Any) -> dict[str, Any]:
    return {**CALL, "function": {**CALL["function"], **function}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "message, shown",
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [SHOWN]}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"content": "", "tool_calls": [SHOWN]}),
        ({"role": "assistant", "content": "Hm.", "tool_calls": []}, {"content": "Hm."}),
        ({"role": "assistant", "content": "Hm.", "tool_calls": None, "refusal": None}, {"content": "Hm."}),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning_content": "b"}),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, {"content": "a", "reasoning_content": "b"}),
        ({"role": "tool", "tool_call_id": "call_1", "content": "3"}, {"content": "3", "tool_call_id": "call_1"}),
        (
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": [{"type": "text", "text": "3"}]},
            {"content": "3", "tool_call_id": "c", "name": "add"},
        ),
        ({"role": "tool", "name": "add", "content": "3"}, {"content": "3", "name": "add"}),
    ],
)
def test_messages_as_templates_see_them(message: dict[str, Any], shown: dict[str, Any]) -> None:
    assert read_message(message, "messages[0]") == {"role": message["role"], **shown}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": ',
        "[1]",
        "3",
        "[" * 100_000,
        '{"a": ' + "1" * 5000 + "}",
        '{"a": "\\ud83d"}',
        '{"a": NaN}',
        '{"a": 1e999}',
    ],
)
def test_arguments_that_are_not_an_object_stay_text(arguments: str) -> None:
    message = read_message({"role": "assistant", "tool_calls": [call(arguments=arguments)]}, "m")
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_no_arguments_are_an_empty_object() -> None:
    message = read_message({"role": "assistant", "tool_calls": [call(arguments="")]}, "m")
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "tool", "content": "3"}, "m.tool_call_id"),
        ({"role": "tool", "tool_call_id": 3, "content": "3"}, "m.tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "m.content"),
        ({"role": "function", "name": "add", "content": "3"}, "m.role"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "m.tool_calls"),
        ({"role": "assistant"}, "m.content"),
        ({"role": "assistant", "tool_calls": "x"}, "m.tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "m.tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "m.tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "m.tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": None}]}, "m.tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call(name=None)]}, "m.tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(arguments={})]}, "m.tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "m.tool_calls"),
        ({"role": "assistant", "function_call": {"name": "add"}, "content": ""}, "m.function_call"),
        ({"role": "assistant", "content": "", "reasoning_content": 3}, "m.reasoning_content"),
    ],
)
def test_errors_name_the_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_message(message, "m")
    assert (caught.value.status, caught.value.param) == (400, param)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **function}}


def test_templates_get_a_tool_unchanged() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}, "required": ["a"]}
    [read] = read_tool(tool(description="Adds.", parameters=schema, strict=True), "tools[0]")
    assert read == Tool("add", "Adds.", schema, strict=True)
    assert read.shown()["function"] == {"name": "add", "description": "Adds.", "parameters": schema}
    assert read_tool(tool(), "t")[0].shown()["function"]["parameters"] == {"type": "object", "properties": {}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "tool, param",
    [
        ({"type": "web_search"}, "t.type"),
        ({}, "t.type"),
        (3, "t"),
        ({"type": "function"}, "t.function"),
        (tool(name="a b"), "t.function.name"),
        (tool(name=None), "t.function.name"),
        (tool(name="a" * 129), "t.function.name"),
        (tool(description=3), "t.function.description"),
        (tool(parameters=[]), "t.function.parameters"),
        (tool(parameters={"type": "string"}), "t.function.parameters"),
        (tool(parameters={"properties": []}), "t.function.parameters"),
        (tool(parameters=nested(33)), "t.function.parameters"),
        (tool(parameters={"required": True}), "t.function.parameters.required"),
        (tool(parameters={"required": [1]}), "t.function.parameters.required"),
        (tool(parameters={"properties": {"a": 3}}), "t.function.parameters.properties"),
        (tool(parameters={"properties": {"a": {"enum": 3}}}), "t.function.parameters.properties"),
        (tool(strict="yes"), "t.function.strict"),
    ],
)
def test_a_wrong_tool_is_named(tool: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tool(tool, "t")
    assert (caught.value.status, caught.value.param) == (400, param)


def model(formats: OutputFormats) -> ServedModel:
    return ServedModel(FakeText(), VOCAB, 1000, formats=formats)


async def test_too_many_tools_and_too_large_ones() -> None:
    known = model(OutputFormats(HERMES))
    many = [tool(name=f"t{index}") for index in range(512)]
    assert len(await read_tools(known, many, read_tool)) == 512
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in ([*many, tool(name="a")], [tool(description="x" * 2**20)], [tool(parameters={"type": deep})]):
        with pytest.raises(ApiError) as caught:
            await read_tools(known, wrong, read_tool)
        assert (caught.value.status, caught.value.param) == (400, "tools")


async def test_duplicate_names_and_unsupported_models() -> None:
    known, two = model(OutputFormats(HERMES)), [tool(name="a"), tool(name="b")]
    assert [read.name for read in await read_tools(known, two, read_tool)] == ["a", "b"]
    assert await read_tools(model(OutputFormats()), [], read_tool) == ()
    for served, tools, param in (
        (model(OutputFormats()), two, "tools"),
        (known, [*two, tool(name="a")], "tools[2]"),
    ):
        with pytest.raises(ApiError) as caught:
            await read_tools(served, tools, read_tool)
        assert caught.value.param == param
