"""Tool calls as JSON objects between two markers: {"name": …, "arguments": {…}}, one or several, in a list or not."""

import json
import re
from collections.abc import Callable

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import json_rules
from baton.models.text.formats.json_scanner import JsonScanner, as_json
from baton.models.text.formats.pieces import Broken, Pieces, Reading
from baton.models.text.formats.values import Tools

ARGUMENTS = ("arguments", "parameters")
# Characters between two calls, or between the last call and the end marker. Models write too many or too few braces.
_BETWEEN = re.compile(r"[ \t\r\n,}\]]*")
_OPEN = re.compile(r"[ \t\r\n\[]*")
_SURROGATES = re.compile("[\ud800-\udfff]")


def json_calls(
    name: str, begin: str, end: str, around: tuple[str, str] = ("\n", "\n"), in_list: bool = False
) -> ToolFormat:
    """Return the tool format with these markers.

    around: what templates write after `begin` and before `end`.
    in_list: whether templates write all calls as items of one list between one pair of markers.

    Once the name is known, arguments are emitted while they are generated, exactly as written. If they stop being valid
    JSON, the call ends there with CallEnded.whole = False, and the rest is text. Once they are complete, the call is
    whole, whatever follows. Arguments that are null or absent become {}; a string that contains an object's JSON
    becomes that object.
    """

    def read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
        yield from pieces.one_of(begin)
        yield from read_calls(pieces, events, end)

    return ToolFormat(name, (begin,), end, read, json_rules(begin, end, around, in_list))


def read_calls(pieces: Pieces, events: Events, end: str) -> Reading[None]:
    """Read calls after the begin marker, up to the marker `end`. Raises Broken if there is no call."""
    yield from _JsonCalls(pieces, events, end).read()


class _JsonCalls:
    """The reader of calls between one pair of markers."""

    def __init__(self, pieces: Pieces, events: Events, end: str) -> None:
        self._pieces = pieces
        self._events = events
        self._end = end
        # Whether the beginning, and the end, of the call that is being read have been emitted.
        self._begun = False
        self._ended = False

    def read(self) -> Reading[None]:
        """Read calls after the begin marker, up to the end marker. Raises Broken if there is no call."""
        pieces = self._pieces
        yield from pieces.run(_OPEN)
        whole = yield from self._call()
        while whole:
            # Everything from here on is text, unless another call or the end marker follows.
            pieces.mark()
            try:
                yield from pieces.run(_BETWEEN)
                if (yield from pieces.peek()) != "{":
                    yield from pieces.one_of(self._end)
                    break
                whole = yield from self._call()
            except Broken:
                pieces.rewind()
                break
        pieces.unmark()

    def _call(self) -> Reading[bool]:
        """Read one object, and return whether it is a whole call. Raises Broken for errors before the call begins."""
        self._begun = self._ended = False
        try:
            yield from self._object()
        except Broken:
            if not self._begun:
                raise
            if self._ended:
                self._pieces.rewind()  # to the end of the arguments, which are complete
            else:
                self._events.end(whole=False)
        return self._ended

    def _object(self) -> Reading[None]:
        """Read {"name": …, "arguments": …} in either order, and skip other keys."""
        # Arguments that come before the name are held until the name is known.
        name, held = "", ""
        yield from self._expect("{")
        following = "" if (yield from self._next()) == '"' else (yield from self._expect("}"))
        while following != "}":
            key = yield from self._string()
            yield from self._expect(":")
            if key == "name" and not self._begun:
                name = yield from self._name()
            elif key in ARGUMENTS and not self._begun and name:
                yield from self._arguments(name)
            elif key in ARGUMENTS and not self._begun:
                held = yield from read_held_object(self._pieces)
            else:
                yield from read_json(self._pieces, lambda text: None)
            if name and held and not self._begun:
                self._emit(name, held)
            following = yield from self._expect(",", "}")
        if not self._begun:
            if not name:
                raise Broken
            self._emit(name, "{}")

    def _arguments(self, name: str) -> Reading[None]:
        """Read the arguments of a call whose name is known. An object is emitted while it is generated."""
        if (yield from self._next()) != "{":
            self._emit(name, (yield from read_held_object(self._pieces)))
            return
        self._begun = True
        self._pieces.unmark()  # The beginning is emitted, so it can no longer become text.
        self._events.begin(name)
        yield from read_json(self._pieces, self._events.arguments)
        self._finish()

    def _emit(self, name: str, arguments: str) -> None:
        """Emit a call whose arguments are complete."""
        self._begun = True
        self._events.begin(name)
        self._events.arguments(arguments)
        self._finish()

    def _finish(self) -> None:
        """End the call, whose arguments are complete. If the object is malformed after them, its rest is text."""
        self._ended = True
        self._events.end(whole=True)
        self._pieces.mark()

    def _name(self) -> Reading[str]:
        name = yield from self._string()
        if not name.strip() or not name.isprintable():
            raise Broken
        return name

    def _string(self) -> Reading[str]:
        text = yield from _captured(self._pieces)
        if not text.startswith('"'):
            raise Broken
        found: str = json.loads(text)
        return found

    def _expect(self, *characters: str) -> Reading[str]:
        """Skip white space, then read and return one of these characters."""
        yield from self._pieces.space()
        return (yield from self._pieces.one_of(*characters))

    def _next(self) -> Reading[str]:
        """Skip white space, and return the next character without reading it."""
        yield from self._pieces.space()
        return (yield from self._pieces.peek())


def read_held_object(pieces: Pieces) -> Reading[str]:
    """Read an object, null (which stands for {}), or a string that contains an object's JSON, and return the object.

    Raises Broken for other values. Unlike `read_json`, this returns the text only when the value is complete.
    """
    text: str | None = yield from _captured(pieces)
    if text and text.startswith('"'):
        text = as_json(json.loads(text) or "null")
    if not text or not text.startswith(("{", "null")) or _SURROGATES.search(text):
        raise Broken
    return "{}" if text == "null" else text


def read_json(pieces: Pieces, take: Callable[[str], None]) -> Reading[None]:
    """Read one JSON value, after white space, and hand it to `take` piece by piece.

    Raises Broken at the first character that is not JSON.
    """
    scanner = JsonScanner()
    yield from pieces.space()
    while not scanner.whole:
        if scanner.broken or not (yield from pieces.more()):
            raise Broken
        text, pieces.at = scanner.feed(pieces.text, pieces.at)
        take(text)


def _captured(pieces: Pieces) -> Reading[str]:
    parts: list[str] = []
    yield from read_json(pieces, parts.append)
    return "".join(parts)
