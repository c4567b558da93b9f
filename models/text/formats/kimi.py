"""Calls as Kimi K2 and Kimi Linear write them: all in one section, each behind an id that has its name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
<|tool_calls_section_end|>, without the line break.
"""

import re
from collections.abc import Mapping
from typing import Any

from baton.models.text.formats.content import Chat, ToolFormat
from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import WantedCalls, alternatives, quoted, value_rule
from baton.models.text.formats.json_calls import read_held_object, read_json
from baton.models.text.formats.pieces import Broken, Pieces, Reading
from baton.models.text.formats.values import Tools

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
NAMESPACE = "functions."

_HEAD = re.compile(r"[^<\r\n]*")
# What stands behind arguments; models write braces too many.
_BEHIND = re.compile(r"[ \t\r\n}\]]*")


class _KimiCalls:
    """A call is told with its name, when its arguments begin; they go out as they come.

    Where they go wrong the call ends, and what is not JSON any more is text. Once they are complete the call is whole,
    whatever follows. Arguments that are null, or not there, are {}; a string that holds an object's JSON is one.
    """

    def __init__(self, pieces: Pieces, events: Events) -> None:
        self._pieces = pieces
        self._events = events

    def read(self) -> Reading[None]:
        """Calls up to the section's end. Models leave its beginning out at times."""
        pieces = self._pieces
        if (yield from pieces.one_of(SECTION_BEGIN, CALL_BEGIN)) == SECTION_BEGIN:
            yield from pieces.space()
            yield from pieces.one_of(CALL_BEGIN)
        whole = yield from self._call()
        while whole:
            # What follows is text, all of it, unless it is the markers or more calls.
            pieces.mark()
            try:
                yield from pieces.run(_BEHIND)
                found = yield from pieces.one_of(CALL_END, CALL_BEGIN, SECTION_END)
                if found == SECTION_END:
                    break
                if found == CALL_BEGIN:
                    whole = yield from self._call()
            except Broken:
                pieces.rewind()
                break
        pieces.unmark()

    def _call(self) -> Reading[bool]:
        """From behind its marker; whether it is whole. Broken if it goes wrong before its name is told."""
        pieces, events = self._pieces, self._events
        yield from pieces.space()
        name = name_in((yield from pieces.run(_HEAD)))
        yield from pieces.space()
        yield from pieces.one_of(ARGUMENTS_BEGIN)
        if not name or not name.isprintable():
            raise Broken
        events.begin(name)
        pieces.mark()
        try:
            yield from self._arguments()
        except Broken:
            events.end(whole=False)
            return False
        events.end(whole=True)
        return True

    def _arguments(self) -> Reading[None]:
        """From the mark on, which is gone then. Broken where they go wrong: what was not told of them is unread."""
        pieces, events = self._pieces, self._events
        yield from pieces.space()
        if (yield from pieces.peek()) == "{":
            pieces.unmark()
            yield from read_json(pieces, events.arguments)
            return
        try:
            events.arguments((yield from self._held()))
        except Broken:
            pieces.rewind()
            raise
        pieces.unmark()

    def _held(self) -> Reading[str]:
        """Arguments that are not written as an object."""
        if (yield from self._pieces.peek()) != CALL_END[0]:
            return (yield from read_held_object(self._pieces))
        yield from self._pieces.one_of(CALL_END)
        return "{}"


def name_in(head: str) -> str:
    """The name in a call's id: functions.NAME:INDEX, of which models leave out all but the name at times."""
    name, _, index = head.rpartition(":")
    return (name if index.strip().isdigit() else head).strip().removeprefix(NAMESPACE)


def kimi_rules(wanted: WantedCalls) -> list[str]:
    """All calls are in one section. Which number is the next is the model's to know."""
    begin, between, end = wanted.marker(CALL_BEGIN), wanted.marker(ARGUMENTS_BEGIN), wanted.marker(CALL_END)
    one = f"{begin} call {end}"
    several = f"({one})+" if wanted.parallel else one
    lines = [f"calls: {several} {wanted.marker(SECTION_END)}", alternatives("call", len(wanted.tools))]
    for index, tool in enumerate(wanted.tools):
        head = quoted(f"{NAMESPACE}{tool.name}:")
        lines.append(f"call_{index}: {head} /0|[1-9][0-9]{{0,4}}/ {between} arguments_{index}")
        lines.append(value_rule(f"arguments_{index}", tool, {"type": "object", **tool.schema}))
    return lines


def numbered(chat: Chat) -> Chat:
    """Calls have the ids functions.NAME:INDEX, where INDEX counts the chat's calls from 0, and results those of calls.

    A result of no call that came before keeps its id.
    """
    shown: list[Mapping[str, Any]] = []
    known: dict[object, str] = {}
    count = 0
    for message in chat:
        if calls := message.get("tool_calls"):
            ids = [f"{NAMESPACE}{call['function']['name']}:{count + index}" for index, call in enumerate(calls)]
            known |= {call.get("id"): id for call, id in zip(calls, ids, strict=True)}
            count += len(calls)
            own = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": own}
        elif (id := message.get("tool_call_id")) in known:
            message = {**message, "tool_call_id": known[id]}
        shown.append(message)
    return shown


def _read(pieces: Pieces, events: Events, tools: Tools) -> Reading[None]:
    yield from _KimiCalls(pieces, events).read()


KIMI = ToolFormat(
    "kimi",
    (SECTION_BEGIN, CALL_BEGIN),
    SECTION_END,
    _read,
    kimi_rules,
    ends_reasoning=(SECTION_BEGIN, CALL_BEGIN),
    within=(ARGUMENTS_BEGIN, CALL_END),
    own_ids=numbered,
)
