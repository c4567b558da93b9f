"""A format's grammar accepts what templates write, and everything that it accepts is a call for the format's parser."""

import json
import random
from collections.abc import Collection, Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.grammars import CallableTool, WantedCalls, arguments_grammar, output_grammar
from baton.models.text.formats.picking import TOOL_FORMATS
from baton.models.text.formats.thinking import THINK, ReasoningFormat
from baton.models.text.grammars import writing
from tests.models.text.formats.parsing import calls_of, content_of, parse
from tests.models.text.formats.test_picking import CALLS, answer, written

OF_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", *OF_KIMI, *SECTION, "<|tool_call_start|>")
EOS = 256
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, Mapping[str, Any]] = {
    "edit": {
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "force": {"type": "boolean"},
            "note": {"$ref": "#/$defs/note"},
        },
        "required": ["path", "text"],
        "$defs": {"note": {"type": "object"}},
    },
    "now": {"properties": {}, "additionalProperties": False},
    "pick": {
        **OBJECT,
        "properties": {"of": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["of", "n"],
    },
}
TOOLS = [CallableTool(name, schema) for name, schema in SCHEMAS.items()]
# For each format, a template in tests/models/text/templates.
TEMPLATES = {
    "hermes": "hermes",
    "qwen3_coder": "xml_tools",
    "nemotron_v2": "nemotron_v2",
    "granite4": "granite",
    "kimi": "kimi",
    "lfm2": "lfm2",
}


def tokenizer(added: Collection[str]) -> Tokenizer:
    """Return a tokenizer with a token for each byte, an end of text, and the added tokens."""
    made = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    made.add_tokens([AddedToken(text, special=index % 2 == 0) for index, text in enumerate(added)])
    return made


def grammar_of(
    format: ToolFormat,
    added: Collection[str],
    required: bool = True,
    parallel: bool = True,
    tools: list[CallableTool] = TOOLS,
    reasoning: ReasoningFormat | None = THINK,
    begun: bool = False,
    answer: str | None = None,
) -> str:
    calls = WantedCalls(tools, format.begins[0], format.rules, added, required, parallel)
    return output_grammar(answer, calls, added, reasoning, begun)


def accepted(grammar: str, added: Collection[str], text: str) -> bool:
    """Return whether the grammar accepts the whole text, and allows the end after it."""
    made = tokenizer(added)
    matcher = LLMatcher(LLTokenizer(made.to_str(), eos_token=EOS), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = made.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_grammar_accepts_what_templates_write(name: str, added: Collection[str]) -> None:
    format = TOOL_FORMATS[name]
    # Grammars do not accept letters written as escapes, so each escape is replaced by its letter.
    shown = [written(TEMPLATES[name], answer("", CALLS[:count])).replace("\\u00e9", "é") for count in (1, 2)]
    one, two = (text.lstrip() for text in shown)
    # The template of qwen3_coder begins every answer with a thought, whose marker is in the prompt.
    begun = name == "qwen3_coder"
    for text in (one, two):
        assert accepted(grammar_of(format, added, begun=begun), added, text), text
        assert accepted(grammar_of(format, added, required=False, begun=begun), added, text), text
        alone = grammar_of(format, added, parallel=False, begun=begun)
        assert accepted(alone, added, text) == (text is one), text
    thought = "Hm.\n</think>\n\n" if begun else "<think>\nHm.\n</think>\n\n"
    call = one.partition("</think>")[2].lstrip("\n") if begun else one
    assert accepted(grammar_of(format, added, begun=begun), added, thought + call)
    assert accepted(grammar_of(format, added, required=False, begun=begun), added, thought + "I will." + call + "So.")
    assert not accepted(grammar_of(format, added, begun=begun), added, thought + "I will." + call)
    assert accepted(grammar_of(format, added, required=False, begun=begun), added, thought + "No.")
    assert not accepted(grammar_of(format, added, begun=begun), added, thought)


def drawn(grammar: str, added: Collection[str], rng: random.Random) -> str:
    """Draw a text that the grammar accepts, token by token. Closing tokens are more likely, so that the text ends."""
    made = tokenizer(added)
    matcher = LLMatcher(LLTokenizer(made.to_str(), eos_token=EOS), grammar)
    ids: list[int] = []
    while len(ids) < 3000:
        mask = matcher.compute_bitmask()
        allowed = [id for id in range(EOS + 1 + len(added)) if mask[id // 8] >> id % 8 & 1]
        closing = [id for id in allowed if id == EOS or made.decode([id], skip_special_tokens=False) in '"]}<>/\n']
        chosen = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if chosen == EOS:
            break
        assert matcher.consume_token(chosen)
        ids.append(chosen)
    assert matcher.is_accepting()
    return str(made.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_accepted_texts_are_calls_that_follow_the_schema(name: str, added: Collection[str]) -> None:
    format, rng = TOOL_FORMATS[name], random.Random(14)
    grammar = grammar_of(format, added, reasoning=None, tools=TOOLS[1:])
    for _ in range(20):
        text = drawn(grammar, added, rng)
        events = parse([text], format, {tool.name: tool.schema for tool in TOOLS})
        calls = calls_of(events)
        assert content_of(events).strip() == "" and calls, text
        for called, arguments, whole in calls:
            values = json.loads(arguments)
            assert whole and called in ("now", "pick")
            assert set(values) == set(SCHEMAS[called]["properties"])
            assert called == "now" or (values["of"] in ("a", "b") and values["n"] in range(10)), text


WRONG = [
    '{"name": "other", "arguments": {}}',
    '{"name": "pick", "arguments": {"of": "c", "n": 1}}',
    '{"name": "pick", "arguments": {"of": "a"}}',
    '{"name": "pick", "arguments": {"of":"a","n":1}}',
    '{"name": "pick", "arguments": {"of": "a", "n": 1, "m": 1}}',
]


@pytest.mark.parametrize("call", WRONG)
def test_other_texts_are_not_accepted(call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    for required in (True, False):
        assert not accepted(grammar_of(TOOL_FORMATS["hermes"], ADDED, required=required), ADDED, text)


PICKED = '{"of": "a", "n": 1}'


def kimi(*heads: str, arguments: str = PICKED) -> str:
    begin, between, end = OF_KIMI
    return SECTION[0] + "".join(f"{begin}{head}{between}{arguments}{end}" for head in heads) + SECTION[1]


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "text, fits",
    [
        (kimi("functions.pick:0"), True),
        (kimi("functions.pick:7", "functions.pick:8", "functions.pick:12345"), True),
        (kimi("functions.other:0"), False),
        (kimi("functions.pick"), False),
        (kimi("pick:0"), False),
        (kimi("functions.pick: 0"), False),
        (kimi("functions.pick:00"), False),
        (kimi("functions.pick:123456"), False),
        (kimi("functions.pick:0", arguments='{"of": "c", "n": 1}'), False),
        (kimi("functions.pick:0", arguments='{"of":"a","n":1}'), False),
        (kimi("functions.now:0"), False),
        (kimi("functions.now:0", arguments="{}"), True),
        (kimi(), False),
        (kimi("functions.pick:0").removesuffix(SECTION[1]), False),
    ],
)
def test_ids_of_calls_name_one_of_these_tools(text: str, fits: bool, added: Collection[str]) -> None:
    for required in (True, False):
        grammar = grammar_of(TOOL_FORMATS["kimi"], added, required, tools=TOOLS[1:])
        assert accepted(grammar, added, text) == fits


def xml(name: str, **parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "text, fits",
    [
        (xml("pick", of="a", n="3"), True),
        (xml("pick", of="c", n="3"), False),
        (xml("pick", of="a", n="30"), False),
        (xml("pick", of="a"), False),
        (xml("edit", path="a", text="</function>\n<b>", lines="[1, 2]"), True),
        (xml("edit", path="a", text="b", note="3"), False),
        (xml("edit", path="a", text="b", note='{"a": 1}'), True),
        (xml("other"), False),
    ],
)
def test_parameters_as_text_follow_their_schema(text: str, fits: bool, added: Collection[str]) -> None:
    grammar = grammar_of(TOOL_FORMATS["qwen3_coder"], added, reasoning=None)
    assert accepted(grammar, added, text) == fits


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        writing.choice(["yes", "no"]),
        writing.regex("^(yes|no)$"),
        writing.grammar('start: "yes" | no\nno: "no"'),
        writing.json_schema({"enum": ["yes", "no"]}),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_an_answer_with_its_own_grammar_or_a_call_after_reasoning(
    answer: str, begun: bool, added: Collection[str]
) -> None:
    quote = '"' * ("json_schema" in answer and "enum" in answer)
    yes, no, maybe = (f"{quote}{text}{quote}" for text in ("yes", "no", "maybe"))
    call = '<tool_call>\n{"name": "pick", "arguments": {"of": "a", "n": 1}}\n</tool_call>'
    thought = "Hm.\n</think>\n\n" if begun else "<think>\nHm.\n</think>\n\n"
    grammar = grammar_of(TOOL_FORMATS["hermes"], added, required=False, begun=begun, answer=answer)
    assert all(accepted(grammar, added, thought + text) for text in (yes, no, call, f"{call}\n{call}"))
    assert not any(accepted(grammar, added, thought + text) for text in ("", maybe, yes + call, call + yes))
    assert accepted(grammar, added, yes) != begun
    alone = output_grammar(answer, None, added, THINK, begun)
    assert accepted(alone, added, thought + no) and not accepted(alone, added, thought + call)
    assert output_grammar(answer, None, added, None, begun) == answer


def test_a_tool_without_a_schema_takes_anything() -> None:
    tools = [CallableTool("any", {})]
    for name, text in (
        ("hermes", '<tool_call>\n{"name": "any", "arguments": {"é": [1]}}\n</tool_call>'),
        ("qwen3_coder", xml("any", a="1", b="x")),
        ("kimi", kimi("functions.any:0", arguments='{"é": [1]}')),
    ):
        assert accepted(grammar_of(TOOL_FORMATS[name], ADDED, tools=tools), ADDED, text)


def test_unsupported_keywords_of_a_strict_schema_are_an_error() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (True, False):
        grammar = grammar_of(TOOL_FORMATS["hermes"], (), tools=[CallableTool("a", schema, strict)])
        wrong = LLMatcher.validate_grammar(grammar)
        assert ("uniqueItems" in wrong) == strict, wrong


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_odd_schemas_make_grammars(name: str) -> None:
    odd = {
        "a\n>": {"type": "string", "enum": ["x", 1, None]},
        'b"': True,
        "c": {"type": ["integer", "null"]},
        "d": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "e": {"const": 3},
        "f": {},
    }
    for required in (True, False):
        tools = [CallableTool("a", {"properties": odd, "required": ["c", "zz"]})]
        wrong = LLMatcher.validate_grammar(grammar_of(TOOL_FORMATS[name], ADDED, required, tools=tools))
        assert not wrong.startswith("ERROR") and "error" not in wrong.lower(), wrong


TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "rows": {"type": "array", "items": {"$ref": "#/properties/v"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["rows"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_references_of_a_parameter_begin_at_the_whole_schema(name: str) -> None:
    format, rng = TOOL_FORMATS[name], random.Random(3)
    grammar = grammar_of(format, (), reasoning=None, parallel=False, tools=[CallableTool("t", TREE)])
    for _ in range(5):
        [(_, arguments, whole)] = calls_of(parse([drawn(grammar, (), rng)], format, {"t": TREE}))
        assert whole
        jsonschema.validate(json.loads(arguments), TREE)


def test_a_grammar_of_arguments_alone_is_that_of_the_whole() -> None:
    tool = CallableTool("pick", SCHEMAS["pick"])
    assert accepted(arguments_grammar(tool), (), PICKED) and not accepted(arguments_grammar(tool), (), '{"of": "a"}')
