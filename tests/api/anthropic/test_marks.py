"""Where marks stand in what templates render: behind the block, whatever comes after it."""

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
    asked = msgspec.convert(body, MessagesRequest)
    tools = [tool for each in asked.tools for tool in read_custom_tool(each, "tools")]
    return conversation(asked, tools), [each.shown() for each in tools]


def parts(text: ModelText, **body: Any) -> list[tuple[str, str]]:
    """What stands before each mark, and what behind it."""
    chat, tools = read(**body)
    ids, _, marks = text.encode_marked_chat(chat.messages, chat.beginnings, tools=tools)
    return [(text.decode(ids[:mark], False), text.decode(ids[mark:], False)) for mark in marks]


def said(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


CALLED = {"type": "tool_use", "id": "t", "name": "alpha", "input": {}}


def result(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": words, **mark}


def test_marks_stand_behind_what_is_marked(text: ModelText) -> None:
    system = [said("first words", **MARK), said("second words")]
    answer = [said("fifth words"), CALLED]
    messages = [
        user(said("third words", **MARK), said("fourth words")),
        {"role": "assistant", "content": answer},
        user(result("sixth words", **MARK), result("seventh words")),
        {"role": "assistant", "content": [said("eighth words", **MARK)]},
        user(said("ninth words")),
    ]
    found = parts(text, system=system, messages=messages, tools=[tool(name) for name in TOOLS])
    assert len(found) == 4
    for (before, after), last, following in zip(
        found, ("first", "third", "sixth", "eighth"), ("second", "fourth", "seventh", "ninth"), strict=True
    ):
        assert f"{last} words" in before and f"{following} words" not in before
        assert f"{following} words" in after and len(before) - before.index(f"{last} words") < 80


def test_marks_of_tools_are_what_prompts_with_these_tools_begin_with(text: ModelText) -> None:
    """Whoever asks, and whatever tools come behind."""
    for system in ("", "kind words"):
        given = {"system": system, "messages": [user(said("who"))]}
        [(first, after)] = parts(text, tools=[tool("alpha", **MARK), tool("beta")], **given)
        assert "Tells alpha." in first and "beta" not in first and "Tells beta." in after
        [(both, after)] = parts(text, tools=[tool("alpha"), tool("beta", **MARK)], **given)
        assert both.startswith(first) and "Tells beta." in both and "who" in after


def test_one_mark_for_all_is_at_the_end(text: ModelText) -> None:
    given: dict[str, Any] = {"messages": [user(said("who"), said("else"))], "cache_control": {"type": "ephemeral"}}
    [(before, after)] = parts(text, **given)
    assert "else" in before and "else" not in after
    given["messages"][0]["content"][1] |= MARK
    assert parts(text, **given) == [(before, after)]
