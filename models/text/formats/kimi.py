"""Tool calls as Kimi K2 and Kimi Linear write them: all in one section, each after an id that contains its name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
<|tool_calls_section_end|>, without the line break.
"""

import re
from collections.abc import Mapping
from typing import Any

from baton.models.text.formats.content import Chat, ToolFormat
from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import MOST_CALLS, WantedCalls, alternatives, arguments_rule, quoted
from baton.models.text.formats.json_calls import read_held_object, read_json
from baton.models.text.formats.pieces import Broken, Pieces, Reading
from baton.models.text.formats.values import Tools

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
NAMESPACE = "functions."

_HEAD = re.compile(r"[^<\r\n]*")
# Characters that are skipped after arguments. Models write too many closing braces.
_AFTER_ARGUMENTS = re.compile(r"[ \t\r\n}\]]*")


class _KimiCalls:
    """The reader of one section of calls.

    A call is emitted with its name when its arguments begin, and the arguments while they are generated. If they stop
    being valid JSON, the call ends there with CallEnded.whole = False, and the rest is text. Once they are complete,
    the call is whole, whatever follows. Arguments that are null or absent become {}; a string that contains an object's
    JSON becomes that object.
    """

    def __init__(self, pieces: Pieces, events: Events) -> None:
        self._pieces = pieces
        self._events = events

    def read(self) -> Reading[None]:
        """Read calls up to the end of the section. Models sometimes leave out the section's begin marker."""
        pieces = self._pieces
        if (yield from pieces.one_of(SECTION_BEGIN, CALL_BEGIN)) == SECTION_BEGIN:
            yield from pieces.space()
            yield from pieces.one_of(CALL_BEGIN)
        whole = yield from self._call()
        while whole:
            # Everything from here on is text, unless a marker or another call follows.
            pieces.mark()
            try:
                yield from pieces.run(_AFTER_ARGUMENTS)
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
        """Read a call after its begin marker, and return whether it is complete.

        Raises Broken if its head, which comes before the arguments, is malformed.
        """
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
        """Read arguments, which begin at the mark, and remove the mark.

        Raises Broken where they are not JSON; then text that has not been emitted counts as unread again.
        """
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
        """Read arguments that are not written as an object: none at all, null, or a string."""
        if (yield from self._pieces.peek()) != CALL_END[0]:
            return (yield from read_held_object(self._pieces))
        yield from self._pieces.one_of(CALL_END)
        return "{}"


def name_in(head: str) -> str:
    """Return the name in a call's id, functions.NAME:INDEX. Models sometimes write only the name."""
    name, _, index = head.rpartition(":")
    return (name if index.strip().isdigit() else head).strip().removeprefix(NAMESPACE)


def kimi_rules(calls: WantedCalls) -> list[str]:
    """Return the rules for calls, all in one section. Any index is allowed: the model knows which index is next."""
    begin, between, end = calls.marker(CALL_BEGIN), calls.marker(ARGUMENTS_BEGIN), calls.marker(CALL_END)
    one = f"{begin} call {end}"
    several = f"({one}){{1,{MOST_CALLS}}}" if calls.parallel else one
    lines = [f"calls: {several} {calls.marker(SECTION_END)}", alternatives("call", len(calls.tools))]
    for index, tool in enumerate(calls.tools):
        head = quoted(f"{NAMESPACE}{tool.name}:")
        lines.append(f"call_{index}: {head} /0|[1-9][0-9]{{0,4}}/ {between} arguments_{index}")
        lines.append(arguments_rule(f"arguments_{index}", tool))
    return lines


def numbered(chat: Chat) -> Chat:
    """Replace the ids of calls by functions.NAME:INDEX, where INDEX counts the chat's calls from 0.

    Tool results get the new ids of their calls. A result keeps its id if its call is not earlier in the chat. A result
    that has only the name of its tool gets the id of the last call of that tool, or the name if there is none.
    """
    shown: list[Mapping[str, Any]] = []
    known: dict[object, str] = {}
    last: dict[str, str] = {}
    count = 0
    for message in chat:
        if calls := message.get("tool_calls"):
            ids = [f"{NAMESPACE}{call['function']['name']}:{count + index}" for index, call in enumerate(calls)]
            known |= {call.get("id"): id for call, id in zip(calls, ids, strict=True)}
            last |= {call["function"]["name"]: id for call, id in zip(calls, ids, strict=True)}
            count += len(calls)
            own = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": own}
        elif (id := message.get("tool_call_id")) in known:
            message = {**message, "tool_call_id": known[id]}
        elif message["role"] == "tool" and id is None and (name := message.get("name")) is not None:
            message = {**message, "tool_call_id": last.get(name, name)}
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
