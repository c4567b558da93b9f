"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

import re
from enum import Enum, auto

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import xml_rules
from baton.models.text.formats.pieces import Broken, Pieces, Reading, beginning
from baton.models.text.formats.values import OtherValue, StringValue, Tools, quoted, types_of, value_of

CALL, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
PARAMETER_END, FUNCTION_END, CALL_END = "</parameter>", "</function>", "</tool_call>"

_LABEL = re.compile(r"[^<>\r\n]*")
_VALUE_END = beginning(PARAMETER_END, FUNCTION_END)


class _Follows(Enum):
    """What comes after a parameter, if not another one."""

    FUNCTION_END = auto()
    CALL_END = auto()
    NOTHING = auto()


class _XmlCalls:
    """A call is told with the name of its first parameter, or its end; then only the end of all text breaks it.

    What is written has no escapes. So a value ends where, white space aside, another parameter or the call's end
    follows its </parameter>, or where </function></tool_call> comes without one; any other marker in it is text. A line
    break at its beginning and one at its end are the format's. If the text ends first the call is not whole, and its
    arguments stop where the text does.
    """

    def __init__(self, pieces: Pieces, events: Events, tools: Tools) -> None:
        self._pieces = pieces
        self._events = events
        self._tools = tools

    def read(self) -> Reading[None]:
        """Functions between <tool_call> and </tool_call>.

        Models leave <tool_call> out at times: then the function must be one of the tools.
        """
        begun = yield from self._pieces.one_of(CALL, FUNCTION)
        if begun == CALL:
            yield from self._expect(FUNCTION)
        ended = yield from self._function(known=begun == FUNCTION)
        while ended is _Follows.FUNCTION_END:
            # What follows is text, all of it, unless it is more functions or the marker.
            self._pieces.mark()
            try:
                if (yield from self._expect(FUNCTION, CALL_END)) == CALL_END:
                    break
                ended = yield from self._function(known=False)
            except Broken:
                self._pieces.rewind()
                break
        self._pieces.unmark()

    def _function(self, known: bool) -> Reading[_Follows]:
        """From behind <function=, and how it ended. Broken if it goes wrong before its first parameter.

        known: it must be one of the tools.
        """
        name = yield from self._label()
        if known and name not in self._tools:
            raise Broken
        follows = yield from self._after()
        if follows is _Follows.NOTHING:
            raise Broken
        self._pieces.unmark()
        self._events.begin(name)
        schema = self._tools.get(name, {})
        separator = "{"
        while isinstance(follows, str):
            self._events.arguments(f'{separator}"{quoted(follows)}": ')
            follows = yield from self._value(value_of(types_of(follows, schema), self._events.arguments))
            separator = ", "
        whole = follows is not _Follows.NOTHING
        if whole:
            self._events.arguments("{}" if separator == "{" else "}")
        self._events.end(whole)
        return follows

    def _value(self, value: StringValue | OtherValue) -> Reading[str | _Follows]:
        """The text of a parameter, and what follows it."""
        pieces = self._pieces
        if (yield from pieces.peek()) == "\n":
            pieces.take(1)
        line_break = ""
        while (yield from pieces.more()):
            text = line_break + pieces.before(_VALUE_END)
            line_break = "\n" if text.endswith("\n") else ""
            value.add(text.removesuffix("\n"))
            if pieces.at == len(pieces.text):
                continue
            pieces.mark()
            try:
                follows = yield from self._after_value()
            except Broken:
                pieces.rewind()
                value.add(line_break + pieces.take(1))
                line_break = ""
            else:
                pieces.unmark()
                value.end()
                return follows
        value.add(line_break)
        value.cut()
        return _Follows.NOTHING

    def _after_value(self) -> Reading[str | _Follows]:
        if (yield from self._pieces.one_of(PARAMETER_END, FUNCTION_END)) == PARAMETER_END:
            return (yield from self._after())
        yield from self._expect(CALL_END)
        return _Follows.CALL_END

    def _after(self) -> Reading[str | _Follows]:
        """The name of the parameter that begins here, after white space, or what else follows."""
        yield from self._pieces.space()
        if not (yield from self._pieces.more()):
            return _Follows.NOTHING
        found = yield from self._pieces.one_of(PARAMETER, FUNCTION_END, CALL_END)
        if found == PARAMETER:
            return (yield from self._label())
        return _Follows.FUNCTION_END if found == FUNCTION_END else _Follows.CALL_END

    def _label(self) -> Reading[str]:
        """A name and the > behind it."""
        label = (yield from self._pieces.run(_LABEL)).strip()
        yield from self._pieces.one_of(">")
        if not label or not label.isprintable():
            raise Broken
        return label

    def _expect(self, *options: str) -> Reading[str]:
        """One of these, after white space."""
        yield from self._pieces.space()
        return (yield from self._pieces.one_of(*options))


def _read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
    yield from _XmlCalls(pieces, events, tools).read()


QWEN3_CODER = ToolFormat("qwen3_coder", (CALL, FUNCTION), CALL_END, _read, xml_rules, ends_reasoning=(CALL, FUNCTION))
