"""Grammars that constrain an output to tool calls in a given format, in llguidance's dialect of Lark.

A marker for which the tokenizer has a token of its own is written as that token. In llguidance's grammars, literal
text never matches such tokens.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.models.text.formats.thinking import ReasoningFormat
from baton.models.text.formats.values import types_of
from baton.models.text.grammars.schemas import escaped, rebased

# JSON is spaced as chat templates space it. So the next turn's prompt, which the template renders, repeats exactly the
# tokens of this output, and the state after them can be reused.
AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
DEFINITIONS = ("$defs", "definitions")
ELSEWHERE = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')  # a reference to anything but a definition
PARAMETER_END = "\n</parameter>\n"
# Line breaks before calls or an answer. Templates write at most two of them, after a thought.
BREAKS = r"/\n{0,2}/"
# Calls in one output.
MOST_CALLS = 64
MORE_CALLS = f"{{0,{MOST_CALLS - 1}}}"
# Where templates separate calls by a line break, an output may also end with one. Otherwise a model that writes one
# instead of ending its output would be forced to write another call.
LAST_BREAK = '"\\n"?'


@dataclass(frozen=True)
class CallableTool:
    """A tool that an output may call."""

    name: str
    schema: Mapping[str, Any]  # the JSON schema of its arguments, which are an object
    strict: bool = False  # whether a schema keyword that cannot be enforced is an error; otherwise it is ignored


@dataclass(frozen=True)
class WantedCalls:
    """The calls that an output may contain, and whether it must contain one."""

    tools: Sequence[CallableTool]
    begin: str  # the marker that begins a call in this format
    rules: "CallRules"  # the grammar rules of this format
    added: Collection[str]  # texts for which the tokenizer has a token of their own
    required: bool
    """Whether the output is nothing but calls, after any reasoning. Otherwise calls may occur within text or in place
    of an answer, or not at all."""
    parallel: bool = True  # whether there may be several calls

    def marker(self, text: str) -> str:
        return marker(text, self.added)


@dataclass(frozen=True)
class ReasoningLimit:
    """The limit of a thought, for a model whose markers of reasoning are tokens of their own."""

    tokens: int  # between the markers; then the end marker follows
    begin: int  # id of the begin marker


CallRules = Callable[[WantedCalls], list[str]]
"""Function that returns a format's rules: `calls`, which begins after the first marker, and the rules that it uses."""


def output_grammar(
    answer: str | None,
    calls: WantedCalls | None,
    added: Collection[str],
    reasoning: ReasoningFormat | None,
    begun: bool,
    limit: ReasoningLimit | None = None,
) -> str:
    """Return the grammar of an output that consists of an answer, of tool calls, of either, or of anything.

    answer: the grammar of the answer; None if there is none.
    calls: the calls that are allowed; None if there are none. If `answer` is None too, `limit` must be given, and
        anything may follow the thought.
    added: texts for which the tokenizer has a token of their own.
    reasoning: the format of reasoning that may come first; None if the model does not reason.
    begun: whether the prompt has already opened the reasoning.
    limit: the limit of the reasoning; None if it has none.
    """
    thought = thought_rules(added, reasoning, begun, limit) if reasoning is not None else []
    if answer is None and calls is None:
        assert thought and limit is not None
        return limited_output(thought, begun, limit)
    if answer is not None and calls is None and not thought:
        return answer
    if answer is not None and calls is not None:
        calls = replace(calls, required=True)  # An output with calls has no text, because text must be the answer.
    lines = ["TEXT: /(?s:.*)/", *thought, *(calls.rules(calls) if calls is not None else [])]
    if answer is not None:
        opening = "" if not thought else f"thought {BREAKS} " if begun else f"(thought {BREAKS})? "
        either = "@answer" if calls is None else f"({calls.marker(calls.begin)} calls | @answer)"
        own = {"name": "output", "lark_grammar": "\n".join([f"start: {opening}{either}", *lines, ""])}
        return json.dumps({"grammars": [own, {**grammar_in(answer), "name": "answer"}]})
    assert calls is not None
    if calls.required:
        opening = "" if not thought else "thought " if begun else "thought? "
        start = [f"start: {opening}{BREAKS} {calls.marker(calls.begin)} calls"]
    else:
        # A limited thought that has begun must end. Otherwise its text could be read as an answer's, without a limit.
        opening = "" if not thought else "thought " if begun and limit is not None else "thought? "
        repeated = "*" if calls.parallel else "?"
        start = [f"start: {opening}(trigger calls){repeated} TEXT", trigger_rule(calls)]
    return "\n".join([*start, *lines, ""])


def grammar_in(text: str) -> dict[str, Any]:
    """Return a grammar of models/text/grammars/writing.py as an item of llguidance's list of grammars.

    text: llguidance's JSON with a single grammar, or Lark.
    """
    try:
        [grammar] = json.loads(text)["grammars"]
    except (ValueError, TypeError):
        return {"lark_grammar": text}
    return dict(grammar)


def limited_output(thought: Sequence[str], begun: bool, limit: ReasoningLimit) -> str:
    """Return the grammar of a thought within its limit and anything after it, or of anything without a thought."""
    start = "thought anything" if begun else "thought anything | thoughtless"
    thoughtless = f"thoughtless: <[^{limit.begin}]>*"
    return "\n".join([f"start: {start}", "anything: <[*]>*", thoughtless, "TEXT: /(?s:.*)/", *thought, ""])


def thought_rules(
    added: Collection[str], reasoning: ReasoningFormat, begun: bool, limit: ReasoningLimit | None = None
) -> list[str]:
    """Return the rule `thought`: reasoning with its markers, but only the end marker if the prompt has `begun` it."""
    begin = "" if begun else f"{marker(reasoning.begin, added)} "
    if limit is not None and reasoning.end in added:
        if limit.tokens == 0:
            return [f"thought: {begin}{reasoning.end}"]
        return [f"thought: {begin}within_limit {reasoning.end}", f"within_limit[max_tokens={limit.tokens}]: TEXT"]
    if reasoning.end in added:
        return [f"thought: {begin}TEXT {reasoning.end}"]
    return [f"thought: {begin}rest_of_thought", up_to("rest_of_thought", reasoning.end)]


def trigger_rule(calls: WantedCalls) -> str:
    """Return the rule `trigger`: text up to and including the marker that begins a call."""
    begin = calls.begin
    return f"trigger: TEXT {begin}" if begin in calls.added else up_to("trigger", begin)


def marker(text: str, added: Collection[str]) -> str:
    """Refer to a marker in a grammar: as a token if the tokenizer has one for it, else as text."""
    return text if text in added else quoted(text)


def json_rules(begin: str, end: str, around: tuple[str, str], in_list: bool) -> CallRules:
    """Return the rules for calls {"name": …, "arguments": {…}} between the markers `begin` and `end`.

    around: what is written after `begin` and before `end`.
    in_list: whether all calls are items of one list between one pair of markers; otherwise each has its own markers.
    """

    def rules(calls: WantedCalls) -> list[str]:
        first, last = quoted(around[0]), f"{quoted(around[1])} {calls.marker(end)}"
        one = f"{first} call {last}"
        if calls.parallel and in_list:
            one = f'{first} call (", " call){MORE_CALLS} {last}'
        elif calls.parallel and calls.required:
            # Where calls are not required, output_grammar's `trigger` repeats them, with text between.
            one = f'{one} ("\\n" {calls.marker(begin)} {one}){MORE_CALLS} {LAST_BREAK}'
        lines = [f"calls: {one}", alternatives("call", len(calls.tools))]
        for index, tool in enumerate(calls.tools):
            head = quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            lines.append(f'call_{index}: {head} arguments_{index} "}}"')
            lines.append(arguments_rule(f"arguments_{index}", tool))
        return lines

    return rules


def xml_rules(calls: WantedCalls) -> list[str]:
    """Return the rules for calls as Qwen3-Coder writes them: one element per parameter, in the order of the schema."""
    begin, end = calls.marker("<tool_call>"), calls.marker("</tool_call>")
    one = f'"\\n" call "\\n" {end}'
    several = calls.parallel and calls.required
    more = f' ("\\n" {begin} {one}){MORE_CALLS} {LAST_BREAK}' if several else ""
    lines = [f"calls: {one}{more}", alternatives("call", len(calls.tools)), up_to("text_value", PARAMETER_END)]
    for index, tool in enumerate(calls.tools):
        lines += xml_call_rules(f"call_{index}", tool)
    return lines


def xml_call_rules(rule: str, tool: CallableTool) -> list[str]:
    """Return a rule for a call of one tool. Parameters that are not required may be left out.

    A schema without properties says nothing about parameters, so any are allowed, with text as their values.
    """
    head, end = quoted(f"<function={tool.name}>\n"), quoted("</function>")
    if "properties" not in tool.schema:
        return [f'{rule}: {head} ("<parameter=" /[^<>\\r\\n]+/ ">\\n" text_value)* {end}']
    required = tool.schema.get("required") or ()
    parts, lines = [], []
    for place, name in enumerate(tool.schema["properties"]):
        parameter = f"{rule}_{place}"
        parts.append(parameter if name in required else f"{parameter}?")
        lines += xml_parameter_rules(parameter, tool, name)
    return [f"{rule}: {' '.join([head, *parts, end])}", *lines]


def xml_parameter_rules(rule: str, tool: CallableTool, name: str) -> list[str]:
    """Return the rules for one parameter: a string is written as plain text, any other value as JSON."""
    head, schema, types = quoted(f"<parameter={name}>\n"), tool.schema["properties"][name], types_of(name, tool.schema)
    if types and "string" not in types:
        value = value_rule(f"{rule}_value", tool, alone(tool.schema, name))
        return [f"{rule}: {head} {rule}_value {quoted(PARAMETER_END)}", value]
    values = schema.get("enum") if types == {"string"} else None
    if values and all(isinstance(value, str) for value in values):
        return [f"{rule}: {head} ({' | '.join(quoted(value) for value in values)}) {quoted(PARAMETER_END)}"]
    return [f"{rule}: {head} text_value"]


def alone(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of one property, with all that its references name."""
    if ELSEWHERE.search(json.dumps(schema)):
        return rebased(schema, f"#/properties/{escaped(name)}")
    return {**{key: schema[key] for key in DEFINITIONS if key in schema}, **schema["properties"][name]}


def arguments_rule(rule: str, tool: CallableTool) -> str:
    """Return a rule for the tool's arguments as a JSON object."""
    return value_rule(rule, tool, {"type": "object", **tool.schema})


def arguments_grammar(tool: CallableTool) -> str:
    """Return the grammar of the tool's arguments alone."""
    return "\n".join(["start: arguments", arguments_rule("arguments", tool), ""])


def value_rule(rule: str, tool: CallableTool, schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON that follows the schema."""
    return f"{rule}: %json " + json.dumps({**schema, "x-guidance": {**AS_TEMPLATES, "lenient": not tool.strict}})


def alternatives(rule: str, count: int) -> str:
    """Return a rule for any one of rule_0, rule_1, …"""
    return f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(count))


def up_to(rule: str, text: str) -> str:
    """Return a rule for everything up to and including the first occurrence of `text`."""
    escaped = "".join(letter if letter.isalnum() else f"\\x{ord(letter):02x}" for letter in text)
    return f"{rule}[lazy]: /(?s:.*){escaped}/"


def quoted(text: str) -> str:
    """Write text as a literal of a grammar."""
    return json.dumps(text)
