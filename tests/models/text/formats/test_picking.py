import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.text.formats.events import OutputEvent, Reasoning
from baton.models.text.formats.picking import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from baton.models.text.template import ChatTemplate
from tests.models.text.formats.parsing import calls_of, content_of, parse

TEMPLATES = Path(__file__).parents[1] / "templates"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "model_type, name, picked",
    [
        ("qwen3_next", "hermes", "hermes"),
        ("granitemoehybrid", "granite", "granite4"),
        ("nemotron_h", "nemotron_v2", "nemotron_v2"),
        ("nemotron_h", "xml_tools", "qwen3_coder"),
        # If the template and the family name different formats, the template counts.
        ("nemotron_h", "hermes", "hermes"),
        ("qwen3_next", "xml_tools", "qwen3_coder"),
        ("mamba2", "hermes", "hermes"),
        ("kimi_linear", "kimi", "kimi"),
        ("qwen3_next", "kimi", "kimi"),
        ("lfm2", "lfm2", "lfm2"),
        ("mamba2", "lfm2", "lfm2"),
    ],
)
def test_templates_determine_the_format_of_calls(model_type: str, name: str, picked: str) -> None:
    assert tool_format(model_type, [PLAIN, template(name)]) is TOOL_FORMATS[picked]


@pytest.mark.parametrize(
    "model_type, picked",
    [
        *((family, "qwen3_coder") for family in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")),
        *(("granitemoehybrid", "granite4"), ("kimi_linear", "kimi"), ("mamba2", None)),
        *(("lfm2", "lfm2"), ("lfm2_moe", "lfm2"), ("lfm3", "lfm2")),
    ],
)
def test_families_determine_it_if_templates_do_not(model_type: str, picked: str | None) -> None:
    found = tool_format(model_type, [PLAIN])
    assert (found and found.name) == picked


@pytest.mark.parametrize(
    "name, picked",
    [
        ("hermes", "think"),
        ("nemotron_v2", "think"),
        ("xml_tools", "think"),
        ("granite", "think"),
        ("kimi", None),
        ("rag", None),
    ],
)
def test_templates_determine_the_format_of_reasoning(name: str, picked: str | None) -> None:
    found = reasoning_format([template(name)])
    assert (found and found.name) == picked
    assert picked is None or found is REASONING_FORMATS[picked]


CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "edit",
        {"path": "a\\b.py", "text": 'if x:\n    print("</p>")\n', "lines": [1, 2], "force": True, "note": {"é": None}},
    ),
    ("now", {}),
]
TOOLS = {"edit": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}, "now": {}}
ASKED = {"role": "user", "content": "Edit."}


def answer(content: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    called = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": called}


def written(name: str, message: dict[str, Any]) -> str:
    """Return the part of a rendered message that the model itself would write."""
    shown, format = ChatTemplate({"default": template(name)}, {"bos_token": ""}), tool_format("", [template(name)])
    assert format is not None
    prompt = shown.render([ASKED], add_generation_prompt=False)
    whole = shown.render(format.own_ids([ASKED, message]), add_generation_prompt=False)
    assert whole.startswith(prompt)
    begin, end = MARKERS[name]
    assert whole[len(prompt) :].startswith(begin) and whole.endswith(end)
    return whole[len(prompt) + len(begin) : -len(end)]


MARKERS = {
    "hermes": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "xml_tools": ("<|im_start|>assistant\n<think>\n", "<|im_end|>\n"),
    "nemotron_v2": ("<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n"),
    "granite": ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    "kimi": ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    "lfm2": ("<|im_start|>assistant\n", "<|im_end|>\n"),
}


def parsed(name: str, text: str) -> list[OutputEvent]:
    templates = [template(name)]
    reasoning = reasoning_format(templates)
    begun = reasoning is not None and reasoning.begun_by(MARKERS[name][0])
    return parse(list(text), tool_format("", templates), TOOLS, reasoning, begun)


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("content", ["", "I will edit\n it."])
@pytest.mark.parametrize("calls", [CALLS, CALLS[:1], CALLS[1:]], ids=["two", "one", "empty"])
def test_what_templates_write_is_parsed_and_written_again(
    name: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """A template writes a parsed answer as the model wrote it, so the next prompt resumes from those tokens' state."""
    text = written(name, answer(content, calls))
    events = parsed(name, text)
    found = [(called, json.loads(arguments)) for called, arguments, _ in calls_of(events)]
    assert (content_of(events), found) == (content, calls)
    assert not any(isinstance(event, Reasoning) for event in events)
    assert written(name, answer(content_of(events), found)) == text


def test_reasoning_that_templates_write_is_parsed() -> None:
    message = {**answer("Yes.", CALLS), "reasoning_content": "Hm.\n\nSo."}
    for name in ("hermes", "xml_tools"):
        events = parsed(name, written(name, message))
        assert events[0] == Reasoning("Hm.\n\nSo.")
        assert content_of(events) == "Yes."
        assert len(calls_of(events)) == 2
