"""Tool calls as LFM2 and LFM2.5 write them, in Python: <|tool_call_start|>[name(key="value", n=1), …]<|tool_call_end|>.

A prompt can ask LFM2 for JSON instead, [{"name": …, "arguments": {…}}, …] between the same markers.
"""

import math
import re
from collections.abc import Mapping

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import (
    MORE_CALLS,
    CallableTool,
    WantedCalls,
    alone,
    alternatives,
    quoted as literal,
    value_rule,
)
from baton.models.text.formats.json_calls import read_calls
from baton.models.text.formats.json_scanner import MAX_DEPTH
from baton.models.text.formats.pieces import Broken, Pieces, Reading
from baton.models.text.formats.values import Tools, quoted, types_of

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"

_LABEL = re.compile(r"""[^=()\[\]{},'"<>\r\n]*""")  # names of tools and of parameters
_WORD = re.compile(r"[\w.+-]*")
_PLAIN = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}  # ends of a string's plain text, by the string's quote
_CLOSING = {"[": "]", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    **{letter: f"\\{letter}" for letter in 'ntrbf\\"'},
    **dict(zip("'/\nav0", ("'", "/", "", "\\u0007", "\\u000b", "\\u0000"), strict=True)),
}
"""The JSON of the escapes of Python's strings."""
COMMENTS = ("description", "title", "default", "examples")  # keywords of a schema that set no condition
_DIGITS = {"x": 2, "u": 4, "U": 8}  # the number of hexadecimal digits of an escape


class _PythonCalls:
    """The reader of calls between one pair of markers.

    A call is emitted when the name of its first parameter, or its end, has been read. Its arguments are emitted as JSON
    while they are generated: strings piece by piece, other values when they are complete. Values are Python's literals
    or JSON. Where they are neither, the call ends with CallEnded.whole = False, and everything that has not been
    emitted is text. Once a call is complete, it is whole, whatever follows.
    """

    def __init__(self, pieces: Pieces, events: Events) -> None:
        self._pieces = pieces
        self._events = events
        self._begun = False  # whether the call that is being read has been emitted

    def read(self) -> Reading[None]:
        """Read calls up to the end marker. Models sometimes leave out the brackets around them, or the end marker."""
        pieces = self._pieces
        yield from pieces.one_of(BEGIN)
        yield from pieces.space()
        if (yield from pieces.peek()) == "[":
            pieces.take(1)
            yield from pieces.space()
        if (yield from pieces.peek()) == "{":
            yield from read_calls(pieces, self._events, END)
            return
        whole = yield from self._call()
        while whole:
            # Everything from here on is text, unless another call or the end follows.
            pieces.mark()
            try:
                found = yield from self._expect(",", "]", END)
                if found == "]":
                    pieces.mark()
                    found = yield from self._expect(END)
                if found == END:
                    break
                whole = yield from self._call()
            except Broken:
                pieces.rewind()
                break
        pieces.unmark()

    def _call(self) -> Reading[bool]:
        """Read a call, and return whether it is complete. Raises Broken for errors before it has been emitted."""
        self._begun = False
        try:
            name = yield from self._label("(")
            if len(name.split()) > 1:
                raise Broken
            yield from self._arguments(name)
        except Broken:
            if not self._begun:
                raise
            self._pieces.rewind()
            self._events.end(whole=False)
            return False
        self._events.end(whole=True)
        return True

    def _arguments(self, name: str) -> Reading[None]:
        """Read and emit arguments after the opening bracket, up to the closing one. name: of the tool."""
        pieces, separator, end = self._pieces, "{", ""
        while end != ")":
            yield from pieces.space()
            if (yield from pieces.peek()) == ")":
                pieces.take(1)
                break
            key = yield from self._label("=")
            self._begin(name)
            self._emit(f'{separator}"{quoted(key)}": ')
            yield from self._value()
            separator, end = ", ", (yield from self._expect(",", ")"))
        self._begin(name)
        self._emit("{}" if separator == "{" else "}")

    def _begin(self, name: str) -> None:
        if not self._begun:
            self._begun = True
            self._events.begin(name)

    def _emit(self, json: str) -> None:
        """Emit a piece of the arguments. If the call breaks later, the text after it is read again."""
        if json:
            self._events.arguments(json)
        self._pieces.mark()

    def _value(self, depth: int = 0) -> Reading[None]:
        yield from self._pieces.space()
        first = yield from self._pieces.peek()
        if first in _PLAIN:
            yield from self._string()
        elif first in _CLOSING and depth < MAX_DEPTH - 1:  # the arguments themselves are an object
            yield from self._collection(depth + 1)
        else:
            self._emit(json_of((yield from self._pieces.run(_WORD))))

    def _collection(self, depth: int) -> Reading[None]:
        """Read a list or a dictionary, whose keys must be strings. depth: the level of its items."""
        pieces = self._pieces
        opening = pieces.take(1)
        closing, found = _CLOSING[opening], ""
        self._emit(opening)
        while found != closing:
            yield from pieces.space()
            if (yield from pieces.peek()) == closing:
                pieces.take(1)
                break
            if found:
                self._emit(", ")
            if opening == "{":
                yield from self._string()
                yield from self._expect(":")
                self._emit(": ")
            yield from self._value(depth)
            found = yield from self._expect(",", closing)
        self._emit(closing)

    def _string(self) -> Reading[None]:
        quote = yield from self._pieces.one_of(*_PLAIN)
        pieces, plain = self._pieces, _PLAIN[quote]
        self._emit('"')
        while (yield from pieces.more()):
            self._emit(quoted(pieces.before(plain)))
            if pieces.at == len(pieces.text):
                continue
            if pieces.take(1) == quote:
                self._emit('"')
                return
            self._emit((yield from self._escape()))
        raise Broken

    def _escape(self) -> Reading[str]:
        """Read an escape after its backslash, and return JSON. As in Python, unknown escapes stand for themselves."""
        if not (yield from self._pieces.more()):
            raise Broken
        letter = self._pieces.take(1)
        if letter not in _DIGITS:
            return _ESCAPES.get(letter) or quoted("" if letter == "\n" else f"\\{letter}")
        digits = ""
        while len(digits) < _DIGITS[letter] and (yield from self._pieces.peek()) in {*"0123456789abcdefABCDEF"}:
            digits += self._pieces.take(1)
        if len(digits) < _DIGITS[letter] or int(digits, 16) > 0x10FFFF:
            return quoted(f"\\{letter}{digits}")
        is_surrogate = 0xD800 <= int(digits, 16) < 0xE000  # half of a pair, as JSON writes some characters
        return f"\\u{int(digits, 16):04x}" if is_surrogate else quoted(chr(int(digits, 16)))

    def _label(self, end: str) -> Reading[str]:
        """Read a name, and the character `end` after it."""
        yield from self._pieces.space()
        label = (yield from self._pieces.run(_LABEL)).strip()
        yield from self._expect(end)
        if not label or not label.isprintable():
            raise Broken
        return label

    def _expect(self, *options: str) -> Reading[str]:
        """Skip white space, then read and return one of the options."""
        yield from self._pieces.space()
        return (yield from self._pieces.one_of(*options))


def json_of(word: str) -> str:
    """Return the JSON of a number or a constant, which Python or JSON wrote. Raises Broken for other words."""
    if word in _WORDS:
        return _WORDS[word]
    if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", word):
        return word
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue
        if isinstance(number, int) or math.isfinite(number):
            return repr(number)
    raise Broken


def python_rules(calls: WantedCalls) -> list[str]:
    """Return the rules for calls, all in one list. Parameters are in the order of the schema."""
    more = f' (", " call){MORE_CALLS}' if calls.parallel else ""
    lines = [f'calls: "[" call{more} "]" {calls.marker(END)}', alternatives("call", len(calls.tools))]
    for index, tool in enumerate(calls.tools):
        lines += call_rules(f"call_{index}", tool)
    return lines


def call_rules(rule: str, tool: CallableTool) -> list[str]:
    """Return the rules for a call of one tool. Parameters that are not required may be left out.

    The first parameter that is written has no comma before it, so there is an alternative for each that can be first.
    A schema without properties says nothing about parameters, so any are allowed, with JSON as their values.
    """
    head = literal(f"{tool.name}(")
    if "properties" not in tool.schema:
        any_value = value_rule(f"{rule}_value", tool, {})
        one = rf'/[\p{{L}}_][\p{{L}}\p{{N}}_.-]*/ "=" {rule}_value'
        return [f'{rule}: {head} ({one} (", " {one})*)? ")"', any_value]
    names, required = list(tool.schema["properties"]), tool.schema.get("required") or ()
    firsts, lines = list[str](), list[str]()
    for place, name in enumerate(names):
        if not any(earlier in required for earlier in names[:place]):
            firsts.append(f"{rule}_{place} {rule}_after_{place}")
        following = '""'
        if place + 1 < len(names):
            further = f'", " {rule}_{place + 1}'
            further = further if names[place + 1] in required else f"({further})?"
            following = f"{further} {rule}_after_{place + 1}"
        lines += [f"{rule}_after_{place}: {following}", *parameter_rules(f"{rule}_{place}", tool, name)]
    optional = "" if any(name in required for name in names) else "?"
    arguments = f"({' | '.join(firsts)}){optional}" if firsts else ""
    return [f'{rule}: {head} {arguments} ")"', *lines]


def parameter_rules(rule: str, tool: CallableTool, name: str) -> list[str]:
    """Return the rules for one parameter, whose value is JSON.

    Where the schema names nothing but types, True and False are written as in Python, None may be, and strings may be
    in single quotes, which some templates write.
    """
    head, types, schema = literal(f"{name}="), types_of(name, tool.schema), tool.schema["properties"][name]
    value = value_rule(f"{rule}_value", tool, alone(tool.schema, name) if isinstance(schema, Mapping) else {})
    if not isinstance(schema, Mapping) or not types or schema.keys() - {"type", *COMMENTS}:
        return [f"{rule}: {head} {rule}_value", value]
    words = {"boolean": '"True" | "False"', "null": '"None"', "string": r"/'([^'\\\n]|\\[ntr'\"\\])*'/"}
    others = [word for kind, word in words.items() if kind in types]
    if types <= {"boolean"}:
        return [f"{rule}: {head} ({' | '.join(others)})"]
    return [f"{rule}: {head} ({' | '.join([f'{rule}_value', *others])})", value]


def _read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
    yield from _PythonCalls(pieces, events).read()


LFM2 = ToolFormat("lfm2", (BEGIN,), END, _read, python_rules, ends_reasoning=(BEGIN, "["))
