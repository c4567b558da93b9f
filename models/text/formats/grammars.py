"""What constrains an output to calls of tools: grammars for llguidance, in its form of Lark, as a format writes calls.

A marker that is one token is referred to as that token: text in such a grammar never matches the tokens that a
tokenizer has for whole texts.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.models.text.formats.thinking import ReasoningFormat
from baton.models.text.formats.values import types_of

# As templates write JSON, so that the next turn's prompt goes on from the tokens of this one.
AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
PARAMETER_END = "\n</parameter>\n"
BREAKS = r"/\n*/"


@dataclass(frozen=True)
class CallableTool:
    """schema: of its arguments, an object's. strict: what of that cannot be held is an error; else it is left out."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class WantedCalls:
    """Which calls an output may have, and whether it must.

    begin, rules: the marker of the format's calls, and what a grammar has for them. added: the texts for which the
    tokenizer has a token each. required: there is nothing but a call, behind reasoning; else calls stand in text or in
    place of an answer, or there are none. parallel: there may be several.
    """

    tools: Sequence[CallableTool]
    begin: str
    rules: "CallRules"
    added: Collection[str]
    required: bool
    parallel: bool = True

    def marker(self, text: str) -> str:
        return marker(text, self.added)


# Rules of a format, for what is wanted: `calls`, from behind the first marker on, and those that it needs.
CallRules = Callable[[WantedCalls], list[str]]


def output_grammar(
    answer: str | None,
    calls: WantedCalls | None,
    added: Collection[str],
    reasoning: ReasoningFormat | None,
    begun: bool,
) -> str:
    """The grammar of an output that has an answer by a grammar of its own, or calls, or one of these.

    added: see WantedCalls. reasoning: None if there is none; begun: by the prompt.
    """
    thought = thought_rules(added, reasoning, begun) if reasoning is not None else []
    if answer is not None and calls is None and not thought:
        return answer
    if answer is not None and calls is not None:
        calls = replace(calls, required=True)  # In place of the answer there is nothing but calls.
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
        opening = "thought? " if thought else ""
        repeated = "*" if calls.parallel else "?"
        start = [f"start: {opening}(trigger calls){repeated} TEXT", trigger_rule(calls)]
    return "\n".join([*start, *lines, ""])


def grammar_in(text: str) -> dict[str, Any]:
    """What models/text/grammars/writing.py has written, as one of several: JSON of a single one, or Lark."""
    try:
        [grammar] = json.loads(text)["grammars"]
    except (ValueError, TypeError):
        return {"lark_grammar": text}
    return dict(grammar)


def thought_rules(added: Collection[str], reasoning: ReasoningFormat, begun: bool) -> list[str]:
    begin = "" if begun else f"{marker(reasoning.begin, added)} "
    if reasoning.end in added:
        return [f"thought: {begin}TEXT {reasoning.end}"]
    return [f"thought: {begin}rest_of_thought", up_to("rest_of_thought", reasoning.end)]


def trigger_rule(calls: WantedCalls) -> str:
    begin = calls.begin
    return f"trigger: TEXT {begin}" if begin in calls.added else up_to("trigger", begin)


def marker(text: str, added: Collection[str]) -> str:
    return text if text in added else quoted(text)


def json_rules(begin: str, end: str, around: tuple[str, str], in_list: bool) -> CallRules:
    """Calls {"name": …, "arguments": {…}}, each between markers and what is `around` it there.

    in_list: all between the same ones, as items of a list.
    """

    def rules(wanted: WantedCalls) -> list[str]:
        first, last = quoted(around[0]), f"{quoted(around[1])} {wanted.marker(end)}"
        one = f"{first} call {last}"
        if wanted.parallel and in_list:
            one = f'{first} call (", " call)* {last}'
        elif wanted.parallel and wanted.required:
            one = f'{one} ("\\n" {wanted.marker(begin)} {one})*'
        lines = [f"calls: {one}", alternatives("call", len(wanted.tools))]
        for index, tool in enumerate(wanted.tools):
            head = quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            lines.append(f'call_{index}: {head} arguments_{index} "}}"')
            lines.append(value_rule(f"arguments_{index}", tool, {"type": "object", **tool.schema}))
        return lines

    return rules


def xml_rules(wanted: WantedCalls) -> list[str]:
    """Calls by parameter, as Qwen3-Coder writes them, in the order of the schema: the required ones and any others."""
    begin, end = wanted.marker("<tool_call>"), wanted.marker("</tool_call>")
    one = f'"\\n" call "\\n" {end}'
    more = f' ("\\n" {begin} {one})*' if wanted.parallel and wanted.required else ""
    lines = [f"calls: {one}{more}", alternatives("call", len(wanted.tools)), up_to("text_value", PARAMETER_END)]
    for index, tool in enumerate(wanted.tools):
        lines += xml_call_rules(f"call_{index}", tool)
    return lines


def xml_call_rules(rule: str, tool: CallableTool) -> list[str]:
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
    """A string is text as it is, all else is JSON."""
    head, schema, types = quoted(f"<parameter={name}>\n"), tool.schema["properties"][name], types_of(name, tool.schema)
    if types and "string" not in types:
        shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
        value = value_rule(f"{rule}_value", tool, {**shared, **schema})
        return [f"{rule}: {head} {rule}_value {quoted(PARAMETER_END)}", value]
    values = schema.get("enum") if types == {"string"} else None
    if values and all(isinstance(value, str) for value in values):
        return [f"{rule}: {head} ({' | '.join(quoted(value) for value in values)}) {quoted(PARAMETER_END)}"]
    return [f"{rule}: {head} text_value"]


def value_rule(rule: str, tool: CallableTool, schema: Mapping[str, Any]) -> str:
    """A value of a schema, in JSON."""
    return f"{rule}: %json " + json.dumps({**schema, "x-guidance": {**AS_TEMPLATES, "lenient": not tool.strict}})


def alternatives(rule: str, count: int) -> str:
    return f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(count))


def up_to(rule: str, text: str) -> str:
    """A rule: everything to the first occurrence of `text`, and that."""
    escaped = "".join(letter if letter.isalnum() else f"\\x{ord(letter):02x}" for letter in text)
    return f"{rule}[lazy]: /(?s:.*){escaped}/"


def quoted(text: str) -> str:
    return json.dumps(text)
