"""Templates in the styles of the families render the same tokens as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.text.template import ChatTemplate
from baton.models.text.tokenizer import ModelText, TemplateError, load_text
from tests.models.oracle import Oracle, write_tokenizer
from tests.models.text.test_tokenizer import CHATML

FOLDER = Path(__file__).with_name("templates")
STYLES = ("hermes", "xml_tools", "nemotron_v2", "granite", "kimi")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What it is like <outside>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. Köln"},
                "days": {"type": "integer", "enum": [1, 3, 7]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": None}}
SYSTEM = {"role": "system", "content": "Be brief. /think"}
ASK = {"role": "user", "content": "Wie ist das Wetter in Köln? <b>"}
CALL = {"name": "get_weather", "arguments": {"city": "Köln", "days": 3, "units": ["°C", "km/h"]}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1", "function": CALL}]}
WRITTEN = {**CALL, "arguments": '{"city": "K\\u00f6ln"}'}
TWO_CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "I should look.\n",
    "tool_calls": [{"type": "function", "function": CALL}, {"type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"sky": "grau"}'}
THOUGHT = {"role": "assistant", "reasoning_content": "It is grey.", "content": "Grey."}
OLD_THOUGHT = {"role": "assistant", "content": "<think>\nIt is grey.\n</think>\n\nGrey."}
PARTS = [{"type": "text", "text": "Two "}, {"type": "text", "text": "parts "}]

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, {"role": "assistant", "content": "Grey."}, {"role": "user", "content": "And /no_think?"}],
    "a call": [SYSTEM, ASK, CALLS, RESULT],
    "a call as text": [ASK, {**CALLS, "tool_calls": [{"type": "function", "function": WRITTEN}]}, RESULT],
    "two calls": [ASK, TWO_CALLS, RESULT, {**RESULT, "content": "7°"}, {"role": "assistant", "content": "Grey, 7°."}],
    "a call is last": [SYSTEM, ASK, {**CALLS, "content": ""}],
    "thoughts": [ASK, THOUGHT, {"role": "user", "content": "Sure?"}, THOUGHT],
    "thoughts under other names": [
        ASK,
        {"role": "assistant", "reasoning": "Grey.", "content": "Grey."},
        ASK,
        {"role": "assistant", "thinking": "Still.", "content": "Grey.", "reasoning_content": None},
    ],
    "thoughts in the content": [ASK, OLD_THOUGHT, {"role": "user", "content": "Sure?"}, OLD_THOUGHT],
    "parts": [
        {"role": "system", "content": PARTS},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": PARTS},
    ],
    "an image": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
    "nulls": [{**ASK, "name": None, "tool_calls": None}, {"role": "assistant", "content": "ok", "tool_calls": None}],
    "an unknown role": [ASK, {"role": "wizard", "content": "Abracadabra"}],
    "spaces": [{"role": "user", "content": "  a\n"}, {"role": "assistant", "content": "\n b  "}],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": True},
    {"tools": [WEATHER, CLOCK]},
    {"tools": [WEATHER["function"]], "add_generation_prompt": True, "enable_thinking": True},
    {"tools": []},
    {"documents": [{"title": "A", "text": "one <i>"}, {"doc_id": "x", "title": "B", "text": "zwölf"}]},
    {"continue_final_message": True},
    {"continue_final_message": True, "tools": [CLOCK]},
]


def checkpoint(folder: Path, **settings: Any) -> ModelText:
    write_tokenizer(folder)
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_text(folder)


def assert_equal(text: ModelText, oracle: Oracle, folder: Path, chat: list[dict[str, Any]], **options: Any) -> bool:
    """Check that Baton and transformers render the same tokens, or both refuse the chat; return whether they accept."""
    expected = oracle.chat(folder, chat, **options)
    arguments = {"add_generation_prompt": False, **options}
    if expected is None:
        with pytest.raises(TemplateError):
            text.render_chat(chat, **arguments)
        return False
    assert text.render_chat(chat, **arguments) == expected[0]
    assert text.encode_chat(chat, **arguments)[0] == expected[1]
    return True


@pytest.mark.parametrize("style", STYLES)
def test_it_renders_as_transformers_does(tmp_path: Path, oracle: Oracle, style: str) -> None:
    (tmp_path / "chat_template.jinja").write_text((FOLDER / f"{style}.jinja").read_text(encoding="utf-8"))
    text = checkpoint(tmp_path)
    accepted = {
        name: [assert_equal(text, oracle, tmp_path, chat, **options) for options in OPTIONS]
        for name, chat in CHATS.items()
    }
    assert all(accepted["one question"]) and all(accepted["a call"][:6]) and any(accepted["thoughts"][7:])


@pytest.mark.parametrize("style", STYLES)
def test_parts_are_joined_as_the_template_joins_them(tmp_path: Path, style: str) -> None:
    (tmp_path / "chat_template.jinja").write_text((FOLDER / f"{style}.jinja").read_text(encoding="utf-8"))
    text = checkpoint(tmp_path)
    assert text.between_parts == ("\n" if style == "granite" else "")
    joined = text.between_parts.join(part["text"] for part in PARTS)
    try:
        shown = text.render_chat([{"role": "user", "content": PARTS}])
    except TemplateError:
        assert style == "nemotron_v2"
    else:
        assert shown == text.render_chat([{"role": "user", "content": joined}])


def test_names_choose_among_several_templates(tmp_path: Path, oracle: Oracle) -> None:
    sources = {name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("hermes", "rag")}
    named = {"default": CHATML, "tool_use": sources["hermes"], "rag": sources["rag"]}
    (tmp_path / "list").mkdir()
    in_a_list = [{"name": name, "template": source} for name, source in named.items()]
    (tmp_path / "files" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "files" / "chat_template.jinja").write_text(named["default"])
    for name in ("tool_use", "rag"):
        (tmp_path / "files" / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    texts = {
        "list": checkpoint(tmp_path / "list", chat_template=in_a_list),
        "files": checkpoint(tmp_path / "files", chat_template="not this"),
    }
    documents = OPTIONS[6]
    for options in ({}, {"tools": [WEATHER]}, {"tools": []}, {"chat_template": "rag", **documents}, documents):
        for folder, text in texts.items():
            assert assert_equal(text, oracle, tmp_path / folder, CHATS["system"], **options)
    for name in ("none", ["rag"]):
        with pytest.raises(TemplateError, match=r"there is no chat template .*, only default, rag, tool_use"):
            texts["list"].render_chat(CHATS["system"], chat_template=name)


def test_only_parts_with_text_can_be_continued(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text((FOLDER / "granite.jinja").read_text(encoding="utf-8"))
    text = checkpoint(tmp_path)
    for content in (None, [], [{"type": "image"}]):
        with pytest.raises(TemplateError, match="no text"):
            text.render_chat([ASK, {"role": "assistant", "content": content}], continue_final_message=True)


STRICT = """
{%- for message in messages -%}
{%- if message['role'] == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- elif not loop.first and message['role'] == messages[loop.index0 - 1]['role'] -%}
{{ raise_exception('Roles must alternate.') }}
{%- endif -%}
<|im_start|>{{ message['role'] + ': ' + message['content'] }}
{%- endfor -%}
"""
FORGETFUL = """
{%- for message in messages -%}
{%- if message['role'] != 'system' or loop.first -%}
<|im_start|>{{ message['role'] + ': ' + message['content'] }}
{%- endif -%}
{%- endfor -%}
"""


@pytest.mark.parametrize("source", [STRICT, FORGETFUL], ids=["refused", "dropped"])
def test_later_system_messages_are_shown_by_templates_that_take_only_one(tmp_path: Path, source: str) -> None:
    text = checkpoint(tmp_path, chat_template=source)

    def shown(*turns: str) -> list[str]:
        messages = [dict(zip(("role", "content"), each.split(": "), strict=True)) for each in turns]
        before = [dict(message) for message in messages]
        rendered = text.render_chat(messages, add_generation_prompt=False)
        assert messages == before
        return rendered.split("<|im_start|>")[1:]

    assert shown("system: A", "user: b", "assistant: c") == ["system: A", "user: b", "assistant: c"]
    assert shown("system: A", "system: B", "user: c") == ["system: A\n\nB", "user: c"]
    assert shown("user: a", "system: B", "user: c") == ["user: a\n\nB\n\nc"]
    assert shown("system: A", "user: b", "assistant: c", "system: D") == [
        "system: A", "user: b", "assistant: c", "user: D",
    ]  # fmt: skip


@pytest.mark.parametrize("style", ["hermes", "granite"])
def test_templates_that_take_any_system_message_get_them_unchanged(tmp_path: Path, oracle: Oracle, style: str) -> None:
    (tmp_path / "chat_template.jinja").write_text((FOLDER / f"{style}.jinja").read_text(encoding="utf-8"))
    text = checkpoint(tmp_path)
    chat = [SYSTEM, ASK, {"role": "system", "content": "Be quick."}, ASK]
    assert assert_equal(text, oracle, tmp_path, chat)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ messages[0]['content'] * 10000000000 }}",
        "{% set x = 2 ** 64 %}{{ (x * x) ** 64 }}",
    ],
)
def test_what_could_not_be_interrupted_is_refused(source: str) -> None:
    """Nothing of it is computed while the template is compiled, and a chat gets an error."""
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(TemplateError, match="too large"):
        template.render([{"role": "user", "content": "a"}], add_generation_prompt=True)


def test_products_and_powers_of_common_templates_are_computed() -> None:
    template = ChatTemplate({"default": "{{ '=' * 3 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ 2 ** 10 }}{{ [0] * 2 }}"}, {})
    assert template.render([], add_generation_prompt=True) == "===123.01024[0, 0]"


@pytest.mark.parametrize(
    "source",
    [
        "{% if x %}" * 5000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in x %}" * 30 + "{% endfor %}" * 30,
        5,
    ],
    ids=["nested ifs", "parentheses", "nested loops", "a number"],
)
def test_what_python_cannot_compile_is_refused(source: Any) -> None:
    with pytest.raises(TemplateError, match="does not compile: "):
        ChatTemplate({"default": source}, {})
