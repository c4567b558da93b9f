"""Positions of cache_control marks in rendered prompts: at the marked block's end, whatever comes after the block."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.api.anthropic.conversation import ReadChat, conversation
from baton.api.anthropic.request import MessagesRequest, read_custom_tool
from baton.models.text.tokenizer import ModelText, load_text

MODELS = Path(__file__).parents[3] / "models"
TEMPLATES = Path(__file__).parents[2] / "models" / "text" / "templates"
MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS = ("alpha", "beta")


@pytest.fixture(params=["granite", "hermes", "kimi", "nemotron_v2", "xml_tools"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> ModelText:
    shutil.copy(MODELS / "bundled" / "tokenizer.json", tmp_path)
    shutil.copy(TEMPLATES / f"{request.param}.jinja", tmp_path / "chat_template.jinja")
    return load_text(tmp_path)


def tool(name: str, **mark: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Tells {name}.", "input_schema": {"type": "object", "properties": {}}, **mark}


def read(**body: Any) -> tuple[ReadChat, list[dict[str, Any]]]:
    request = msgspec.convert(body, MessagesRequest)
    tools = [tool for each in request.tools for tool in read_custom_tool(each, "tools")]
    return conversation(request, tools), [each.shown() for each in tools]


def parts(text: ModelText, **body: Any) -> list[tuple[str, str]]:
    """Return the rendered text before and after each cache_control mark."""
    chat, tools = read(**body)
    ids, _, marks = text.encode_marked_chat(chat.messages, chat.beginnings, tools=tools)
    return [(text.decode(ids[:mark], False), text.decode(ids[mark:], False)) for mark in marks]


def says(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


CALLED = {"type": "tool_use", "id": "t", "name": "alpha", "input": {}}


def result(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": words, **mark}


def test_marks_are_at_the_ends_of_marked_blocks(text: ModelText) -> None:
    system = [says("first words", **MARK), says("second words")]
    answer = [says("fifth words"), CALLED]
    messages = [
        user(says("third words", **MARK), says("fourth words")),
        {"role": "assistant", "content": answer},
        user(result("sixth words", **MARK), result("seventh words")),
        {"role": "assistant", "content": [says("eighth words", **MARK)]},
        user(says("ninth words")),
    ]
    found = parts(text, system=system, messages=messages, tools=[tool(name) for name in TOOLS])
    assert len(found) == 4
    for (before, after), last, following in zip(
        found, ("first", "third", "sixth", "eighth"), ("second", "fourth", "seventh", "ninth"), strict=True
    ):
        assert f"{last} words" in before and f"{following} words" not in before
        assert f"{following} words" in after and len(before) - before.index(f"{last} words") < 80


def test_marks_of_tools_do_not_depend_on_what_follows(text: ModelText) -> None:
    for system in ("", "kind words"):
        fields = {"system": system, "messages": [user(says("who"))]}
        [(first, after)] = parts(text, tools=[tool("alpha", **MARK), tool("beta")], **fields)
        assert "Tells alpha." in first and "beta" not in first and "Tells beta." in after
        [(both, after)] = parts(text, tools=[tool("alpha"), tool("beta", **MARK)], **fields)
        assert both.startswith(first) and "Tells beta." in both and "who" in after


def test_a_mark_of_the_whole_body_is_at_the_end(text: ModelText) -> None:
    fields: dict[str, Any] = {"messages": [user(says("who"), says("else"))], "cache_control": {"type": "ephemeral"}}
    [(before, after)] = parts(text, **fields)
    assert "else" in before and "else" not in after
    fields["messages"][0]["content"][1] |= MARK
    assert parts(text, **fields) == [(before, after)]
