"""The answer of a model, with calls of tools in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import CallRules
from baton.models.text.formats.pieces import WHITE_SPACE, Broken, Pieces, Reading, Trailing, beginning
from baton.models.text.formats.values import Tools

Chat: TypeAlias = Sequence[Mapping[str, Any]]


def as_it_is(chat: Chat) -> Chat:
    return chat


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls of tools.

    begins: the markers that calls begin with, the usual one first. end: the marker that they end with.
    read: reads calls, from the first character of a marker on, and tells them. Broken if none is there: then it has
    told nothing, and left the mark where it was. A call whose name was told ends where it goes wrong.
    rules: what a grammar has for calls.
    ends_reasoning: what shows, white space between, that a call begins in reasoning that was not ended first.
    within: other markers that stand in calls.
    own_ids: a chat's messages with the ids of calls that the model writes itself, if it writes some.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    read: Callable[[Pieces, Events, Tools], Reading[None]]
    rules: CallRules
    ends_reasoning: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    own_ids: Callable[[Chat], Chat] = as_it_is


def read_content(pieces: Pieces, events: Events, format: ToolFormat, tools: Tools) -> Reading[None]:
    """The answer, up to the end of all text.

    A marker that no call follows is text, and what is behind it is looked at anew. White space directly before a call
    is dropped, as is that from the last one to the end: templates write their own there. All else is kept.
    """
    marker = beginning(*format.begins)
    text = Trailing(events.content, WHITE_SPACE)
    while (yield from pieces.more()):
        text.add(pieces.before(marker))
        if pieces.at == len(pieces.text):
            continue
        pieces.mark()
        try:
            yield from format.read(pieces, events, tools)
        except Broken:
            pieces.rewind()
            text.add(pieces.take(1))
        else:
            text.drop()
    if not text.behind_marker:
        text.release()


def read_plain(pieces: Pieces, events: Events) -> Reading[None]:
    """The answer where no calls are looked for."""
    while (yield from pieces.more()):
        events.content(pieces.take(len(pieces.text)))
