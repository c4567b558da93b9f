"""The contents of a grammar in llguidance's dialect of Lark, and its dead ends: rules that produce no finite text."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.models.text.grammars.endless import cycle_from, endless_in

TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//.*|\#.*)
    |(?P<line>\n(?:[ \t\r\n]*\|)?)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|<[^<>\n]+>)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<directive>%(?:import|ignore|declare).*)
    |(?P<embedded>%\w+\s*)
    |(?P<name>@?\w+)
    |(?P<optional>[?*]|\{\s*0*\s*(?:,[\s\d]*)?\}|~\s*0+\b(?:\s*\.\.\s*\d+)?)
    |(?P<other>->\s*\w+|\.\.|[&!~+]|\{[\s,\d]*\}|\[[^\]\n]*\]\s*(?=:)|[0-9]+)
    |(?P<sign>[()\[\]|:])""",
    re.VERBOSE,
)
JSON = json.JSONDecoder()
START = "start"
GROUP = "("  # is in the names that groups get, after the rule's name


class UnknownSyntax(Exception):
    """Syntax that this module does not read."""


class Token(NamedTuple):
    kind: str
    text: str
    value: Any = None  # the JSON after a %keyword


@dataclass
class Contents:
    """The contents of a grammar. A group in parentheses or brackets counts as a rule of its own."""

    alternatives: dict[str, list[list[str]]] = field(default_factory=dict)  # the rules that each alternative needs
    mentions: dict[str, list[str]] = field(default_factory=dict)  # all rules that a rule names
    regexes: list[tuple[str, str]] = field(default_factory=list)  # a rule's name, and a regex in it, between slashes
    schemas: list[tuple[str, Any]] = field(default_factory=list)  # a rule's name, and a JSON schema in it

    def begin(self, name: str) -> None:
        self.alternatives[name], self.mentions[name] = [[]], []


def contents_of(text: str) -> Contents:
    """Read a grammar. Raises UnknownSyntax for rare syntax and for errors, which llguidance reports better."""
    contents = Contents()
    for line in lines_of(tokens_of(text)):
        words = line[1:] if line[0].text in "?!" else line
        kinds = [token.kind for token in words[:3]]
        colon = next((index for index, token in enumerate(words[:3]) if token.text == ":"), None)
        if kinds[0] in ("directive", "embedded"):
            continue
        if kinds[0] != "name" or colon is None or (colon == 2 and kinds[1] != "other"):
            raise UnknownSyntax
        read_rule(words[0].text, words[colon + 1 :], contents)
    return contents


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the tokens of a grammar. Raises UnknownSyntax."""
    position = 0
    while position < len(text):
        found = TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise UnknownSyntax
        position, value = found.end(), None
        if found.lastgroup == "embedded":
            try:
                value, position = JSON.raw_decode(text, position)
            except (ValueError, RecursionError):
                raise UnknownSyntax from None
        if found.lastgroup != "space":
            yield Token(found.lastgroup, found[0], value)


def lines_of(tokens: Iterator[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each rule or directive. A line that begins with | continues the rule above it."""
    line: list[Token] = []
    for token in tokens:
        if token.kind != "line":
            line.append(token)
        elif token.text != "\n":
            line.append(Token("sign", "|"))
        elif line:
            yield line
            line = []
    if line:
        yield line


def read_rule(rule: str, body: Sequence[Token], contents: Contents) -> None:
    """Add a rule to `contents`. Raises UnknownSyntax."""
    contents.begin(rule)
    open, last = [rule], ""  # the rule and the groups around the position; what the last item needs, or ""
    for token in body:
        inside = open[-1]
        needed = contents.alternatives[inside][-1]
        match token.kind, token.text:
            case "name", name if name.lstrip("_")[:1].islower():
                last = name
                needed.append(name)
                contents.mentions[inside].append(name)
            case "sign", "(" | "[":
                group = f"{rule}{GROUP}{len(contents.alternatives)}"
                contents.begin(group)
                contents.mentions[inside].append(group)
                if token.text == "(":
                    needed.append(group)
                open.append(group)
            case "sign", ")" | "]" if len(open) > 1:
                last = open.pop() if token.text == ")" else open.pop() and ""
            case "sign", "|":
                contents.alternatives[inside].append([])
            case "sign", _:
                raise UnknownSyntax
            case "optional", _:
                if last:
                    needed.pop()
                last = ""
            case "other", _:
                pass
            case _:
                last = ""
                if token.kind == "regex":
                    contents.regexes.append((rule, token.text))
                elif token.text.startswith("%json"):
                    contents.schemas.append((rule, token.value))
    if len(open) > 1:
        raise UnknownSyntax


def dead_end_in(contents: Contents) -> str:
    """Say which rule can produce no finite text, and why; "" if there is none."""
    waiting, needs = [START], dict[str, list[list[list[str]]]]()
    for name in waiting:  # The loop also reaches the names that are added meanwhile.
        if name in contents.alternatives and name not in needs:
            needs[name] = [contents.alternatives[name]]
            waiting += contents.mentions[name]
    endless = endless_in(needs)
    if not endless:
        return ""
    cycle = [name.partition(GROUP)[0] for name in cycle_from(next(iter(endless)), needs, endless.keys())]
    rule, *others = dict.fromkeys(cycle)
    if not others:
        return f"rule {rule!r} never ends: each of its alternatives contains {rule!r} again"
    return f"rule {rule!r} never ends: it always needs {others[0]!r}, which leads to {rule!r} again"
