"""How templates keep the reasoning of earlier turns: the variables that they read, found out with a probe chat."""

import pytest

from baton.models.text.template import ChatTemplate, KeptReasoning, in_content
from tests.models.text.test_templates import FOLDER

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "{{ m.content }}<|im_end|>\n{% endfor %}"
THOUGHT = "{% if m.reasoning_content and (CONDITION) %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
STRIPPED = (
    "{% set c = m.content.split('</think>')[-1] if not (CONDITION) else m.content %}{{ c }}<|im_end|>\n{% endfor %}"
)


def template(condition: str) -> ChatTemplate:
    """Return a template that shows the field with reasoning of messages for which the condition is true."""
    return ChatTemplate({"default": HEAD + THOUGHT.replace("CONDITION", condition) + TAIL}, {})


@pytest.mark.parametrize(
    ("condition", "variables"),
    [
        ("preserve_thinking is defined and preserve_thinking", {"preserve_thinking": True}),
        ("clear_thinking is defined and not clear_thinking", {"clear_thinking": False}),
        ("not (truncate_history_thinking | default(true))", {"truncate_history_thinking": False}),
        ("true", {}),
    ],
)
def test_templates_that_read_the_field(condition: str, variables: dict[str, bool]) -> None:
    assert template(condition).kept_reasoning == KeptReasoning(variables, in_content=False)


@pytest.mark.parametrize(
    ("condition", "variables"), [("keep_past_thinking", {"keep_past_thinking": True}), ("true", {})]
)
def test_templates_that_read_only_the_content(condition: str, variables: dict[str, bool]) -> None:
    source = HEAD + STRIPPED.replace("CONDITION", condition)
    assert ChatTemplate({"default": source}, {}).kept_reasoning == KeptReasoning(variables, in_content=True)


def test_templates_that_write_calls_before_the_content() -> None:
    """LFM2.5's do. A model thinks before it calls, so reasoning in the content would be in the wrong place."""
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    first, last = HEAD + calls + TAIL, HEAD + "{{ m.content }}" + calls + "<|im_end|>\n{% endfor %}"
    assert ChatTemplate({"default": first}, {}).kept_reasoning == KeptReasoning({}, in_content=True, calls_first=True)
    assert ChatTemplate({"default": last}, {}).kept_reasoning == KeptReasoning({}, in_content=True)
    assert ChatTemplate({"default": first, "tool_use": last}, {}).kept_reasoning == KeptReasoning({}, in_content=True)


@pytest.mark.parametrize(
    ("style", "history"),
    [
        ("granite", KeptReasoning({}, in_content=True)),
        ("hermes", None),
        ("kimi", KeptReasoning({}, in_content=True)),
        ("lfm2", KeptReasoning({}, in_content=True, calls_first=True)),
        ("nemotron_v2", None),
        ("xml_tools", KeptReasoning({}, in_content=False)),
    ],
)
def test_templates_in_the_styles_of_the_families(style: str, history: KeptReasoning | None) -> None:
    source = (FOLDER / f"{style}.jinja").read_text(encoding="utf-8")
    assert ChatTemplate({"default": source}, {"bos_token": "<s>"}).kept_reasoning == history


def test_templates_that_leave_reasoning_out() -> None:
    source = HEAD + STRIPPED.replace("CONDITION", "loop.last")
    assert ChatTemplate({"default": source}, {}).kept_reasoning is None
    refusing = "{{ raise_exception('roles') if messages | length > 1 }}"
    assert ChatTemplate({"default": refusing}, {}).kept_reasoning is None


def test_reasoning_in_the_content() -> None:
    message = {"role": "assistant", "content": "7", "reasoning_content": "5 + 2", "tool_calls": []}
    joined = in_content(message, "<think>", "</think>")
    assert joined == {"role": "assistant", "content": "<think>\n5 + 2\n</think>\n\n7", "tool_calls": []}
    assert in_content({"role": "user", "content": "a"}, "<think>", "</think>") == {"role": "user", "content": "a"}
