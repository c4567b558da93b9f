"""Markers of a model's formats are decoded as text, even if the tokenizer has special tokens for them."""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.api.config import Config
from baton.models.text.formats.picking import REASONING_FORMATS, TOOL_FORMATS, OutputFormats, output_formats
from baton.models.text.formats.qwen3_coder import QWEN3_CODER
from baton.models.text.formats.thinking import THINK
from baton.models.text.tokenizer import ModelText, load_text

SPECIAL = ("<s>", "<think>", "</think>", "<tool_call>")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools and deep %}<tool_call>{% endif %}"


@pytest.fixture
def text(tmp_path: Path) -> ModelText:
    made = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken("</tool_call>", special=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return load_text(tmp_path)


def test_markers_are_text_and_other_special_tokens_are_not(text: ModelText) -> None:
    ids = text.encode("<s><think>Hm é</think>a<tool_call>b</tool_call><s>")
    assert text.added_tokens == {*SPECIAL, "</tool_call>"}
    assert text.decode(ids) == "Hm éab</tool_call>"
    text.show(OutputFormats(QWEN3_CODER, THINK).markers)
    assert text.decode(ids) == "<think>Hm é</think>a<tool_call>b</tool_call>"
    assert text.decode(ids * 200) == "<think>Hm é</think>a<tool_call>b</tool_call>" * 200
    assert text.decode(ids, skip_special_tokens=False).startswith("<s><think>")
    text.show(())
    assert text.decode(ids) == "Hm éab</tool_call>"


def test_markers_within_calls_are_text_too() -> None:
    markers = OutputFormats(TOOL_FORMATS["kimi"]).markers
    assert {"<|tool_call_argument_begin|>", "<|tool_call_end|>"} < markers and len(markers) == 5


def test_variables_of_templates_are_known(text: ModelText) -> None:
    assert text.template_variables == {"messages", "tools", "deep"}
    assert text.templates == {"default": TEMPLATE}


def test_formats_are_picked_or_named() -> None:
    templates = ["<think> <tool_call>{{ tools }}"]
    assert output_formats("mamba2", templates) == OutputFormats(TOOL_FORMATS["hermes"], THINK)
    assert output_formats("mamba2", templates, "granite4", "none") == OutputFormats(TOOL_FORMATS["granite4"], None)
    assert output_formats("mamba2", [], "none", "think") == OutputFormats(None, THINK)
    for named in ({"tools": "hermit"}, {"reasoning": "hermes"}):
        with pytest.raises(ValueError, match="there is no format 'herm"):
            output_formats("mamba2", templates, **named)


def test_the_options_name_every_format() -> None:
    hints = get_type_hints(Config)
    assert set(get_args(hints["tool_parser"])) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(
    "answer, is_open",
    [("<think>\nHm", True), ("\n<think>", True), ("<think>Hm</think>a", False), ("a <think>", False), ("", False)],
)
def test_an_answer_that_is_continued_may_still_be_reasoning(answer: str, is_open: bool) -> None:
    assert THINK.open_in(answer) == is_open
