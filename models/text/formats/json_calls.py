"""Calls as JSON objects between two markers: {"name": …, "arguments": {…}}, one or several, in a list or not."""

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
# What stands between two calls, or between the last and the marker; models write braces too many, and too few.
_BETWEEN = re.compile(r"[ \t\r\n,}\]]*")
_OPEN = re.compile(r"[ \t\r\n\[]*")
_SURROGATES = re.compile("[\ud800-\udfff]")


def json_calls(
    name: str, begin: str, end: str, around: tuple[str, str] = ("\n", "\n"), in_list: bool = False
) -> ToolFormat:
    """The format with these markers; around, in_list: what templates write between them and calls.

    Arguments go out as they come and as they are written, once the name is known. Where they go wrong the call ends,
    and what is not JSON any more is text. Once they are complete the call is whole, whatever follows. Arguments that
    are null, or not there, are {}; a string that holds an object's JSON is that object.
    """

    def read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
        yield from _JsonCalls(pieces, events, end).read(begin)

    return ToolFormat(name, (begin,), end, read, json_rules(begin, end, around, in_list))


class _JsonCalls:
    def __init__(self, pieces: Pieces, events: Events, end: str) -> None:
        self._pieces = pieces
        self._events = events
        self._end = end
        # Of the call that is being read: whether its name was told, and its end.
        self._told = False
        self._ended = False

    def read(self, begin: str) -> Reading[None]:
        pieces = self._pieces
        yield from pieces.one_of(begin)
        yield from pieces.run(_OPEN)
        whole = yield from self._call()
        while whole:
            # What follows is text, all of it, unless it is more calls or the marker.
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
        """One object; whether it is a whole call. Broken if it goes wrong before its name is told."""
        self._told = self._ended = False
        try:
            yield from self._object()
        except Broken:
            if not self._told:
                raise
            if self._ended:
                self._pieces.rewind()
            else:
                self._events.end(whole=False)
        return self._ended

    def _object(self) -> Reading[None]:
        name, held = "", ""
        yield from self._expect("{")
        following = "" if (yield from self._next()) == '"' else (yield from self._expect("}"))
        while following != "}":
            key = yield from self._string()
            yield from self._expect(":")
            if key == "name" and not self._told:
                name = yield from self._name()
            elif key in ARGUMENTS and not self._told and name:
                yield from self._arguments(name)
            elif key in ARGUMENTS and not self._told:
                held = yield from read_held_object(self._pieces)
            else:
                yield from read_json(self._pieces, lambda text: None)
            if name and held and not self._told:
                self._tell(name, held)
            following = yield from self._expect(",", "}")
        if not self._told:
            if not name:
                raise Broken
            self._tell(name, "{}")

    def _arguments(self, name: str) -> Reading[None]:
        """Those of a call whose name is known: an object goes out as it comes."""
        if (yield from self._next()) != "{":
            self._tell(name, (yield from read_held_object(self._pieces)))
            return
        self._told = True
        self._pieces.unmark()
        self._events.begin(name)
        yield from read_json(self._pieces, self._events.arguments)
        self._finish()

    def _tell(self, name: str, arguments: str) -> None:
        self._told = True
        self._events.begin(name)
        self._events.arguments(arguments)
        self._finish()

    def _finish(self) -> None:
        """The arguments are complete; should the rest of the object be broken it is text from here on."""
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
        """One of these, after white space."""
        yield from self._pieces.space()
        return (yield from self._pieces.one_of(*characters))

    def _next(self) -> Reading[str]:
        """The next character that is no white space, unread."""
        yield from self._pieces.space()
        return (yield from self._pieces.peek())


def read_held_object(pieces: Pieces) -> Reading[str]:
    """An object, or what stands for one: null, or a string that holds one's JSON. Broken for another value."""
    text: str | None = yield from _captured(pieces)
    if text and text.startswith('"'):
        text = as_json(json.loads(text) or "null")
    if not text or not text.startswith(("{", "null")) or _SURROGATES.search(text):
        raise Broken
    return "{}" if text == "null" else text


def read_json(pieces: Pieces, take: Callable[[str], None]) -> Reading[None]:
    """One JSON value, after white space, handed to `take` as it comes. Broken where it goes wrong."""
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
