"""Tool calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them.

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
    """The possible continuations after a parameter, other than a further parameter."""

    FUNCTION_END = auto()
    CALL_END = auto()
    NOTHING = auto()  # the output is over


class _XmlCalls:
    """The reader of calls in this format.

    A call is emitted when the name of its first parameter, or its end, has been read. From then on, only the end of the
    output can cut the call off.

    Values have no escapes, so they may contain markers as text. A value ends at a </parameter> only if another
    parameter or the end of the call follows, white space aside. It also ends at </function></tool_call> without a
    </parameter>. One line break at the beginning and one at the end of a value belong to the format. If the output ends
    inside a call, CallEnded.whole is False, and the arguments stop where the output does.
    """

    def __init__(self, pieces: Pieces, events: Events, tools: Tools) -> None:
        self._pieces = pieces
        self._events = events
        self._tools = tools

    def read(self) -> Reading[None]:
        """Read the functions between <tool_call> and </tool_call>.

        Models sometimes leave out <tool_call>; then the function must be one of the tools.
        """
        begun = yield from self._pieces.one_of(CALL, FUNCTION)
        if begun == CALL:
            yield from self._expect(FUNCTION)
        ended = yield from self._function(known=begun == FUNCTION)
        while ended is _Follows.FUNCTION_END:
            # Everything from here on is text, unless another function or the end marker follows.
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
        """Read a function after <function=, and return what ended it. Raises Broken for errors before a parameter.

        known: whether the function must be one of the tools.
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
        """Read the text of a parameter into `value`, and return what follows the parameter."""
        pieces = self._pieces
        if (yield from pieces.peek()) == "\n":
            pieces.take(1)
        line_break = ""  # held back: part of the format if the value ends after it, else of the value
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
                # A marker that does not end the value is part of it.
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
        """Read the end of a value, and return what follows the parameter. Raises Broken if it does not end here."""
        if (yield from self._pieces.one_of(PARAMETER_END, FUNCTION_END)) == PARAMETER_END:
            return (yield from self._after())
        yield from self._expect(CALL_END)
        return _Follows.CALL_END

    def _after(self) -> Reading[str | _Follows]:
        """Skip white space, and return the name of the parameter that begins there, or what else follows."""
        yield from self._pieces.space()
        if not (yield from self._pieces.more()):
            return _Follows.NOTHING
        found = yield from self._pieces.one_of(PARAMETER, FUNCTION_END, CALL_END)
        if found == PARAMETER:
            return (yield from self._label())
        return _Follows.FUNCTION_END if found == FUNCTION_END else _Follows.CALL_END

    def _label(self) -> Reading[str]:
        """Read a name and the > after it."""
        label = (yield from self._pieces.run(_LABEL)).strip()
        yield from self._pieces.one_of(">")
        if not label or not label.isprintable():
            raise Broken
        return label

    def _expect(self, *options: str) -> Reading[str]:
        """Skip white space, then read and return one of the options."""
        yield from self._pieces.space()
        return (yield from self._pieces.one_of(*options))


def _read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
    yield from _XmlCalls(pieces, events, tools).read()


QWEN3_CODER = ToolFormat("qwen3_coder", (CALL, FUNCTION), CALL_END, _read, xml_rules, ends_reasoning=(CALL, FUNCTION))
