"""Reader of the answer in a model's output, which may contain tool calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.models.text.formats.events import Events
from baton.models.text.formats.grammars import CallRules
from baton.models.text.formats.pieces import WHITE_SPACE, Broken, Pieces, Reading, Trailing, beginning
from baton.models.text.formats.values import Tools

Chat: TypeAlias = Sequence[Mapping[str, Any]]


def unchanged(chat: Chat) -> Chat:
    return chat


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls."""

    name: str
    begins: tuple[str, ...]  # the markers that calls begin with, the usual one first
    end: str  # the marker that calls end with
    read: Callable[[Pieces, Events, Tools], Reading[None]]
    """Function that reads calls, from the first character of a `begins` marker on, and emits their events.

    It raises Broken if no call is there; then it has emitted nothing and has not moved the mark (see Pieces). A call
    that goes wrong after its name was emitted ends there, with CallEnded.whole = False.
    """
    rules: CallRules  # grammar rules that constrain an output to calls in this format
    ends_reasoning: tuple[str, ...] = ()
    """Texts that, one after another with white space between, show that a call begins inside unclosed reasoning."""
    within: tuple[str, ...] = ()  # other markers that occur in calls
    own_ids: Callable[[Chat], Chat] = unchanged
    """Function that replaces the call ids in a chat by the ids that the model itself writes, if its calls have ids."""


def read_content(pieces: Pieces, events: Events, format: ToolFormat, tools: Tools) -> Reading[None]:
    """Read the answer up to the end of the output, and emit its text and calls.

    A marker that no call follows is text; reading resumes after its first character. White space directly before a
    call, and between the last call and the end, is dropped, because templates write their own white space there.
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
            # No call: only the marker's first character is certainly text, another marker may begin after it.
            pieces.rewind()
            text.add(pieces.take(1))
        else:
            text.drop()
    if not text.after_marker:
        text.release()


def read_plain(pieces: Pieces, events: Events) -> Reading[None]:
    """Read an answer in which no calls are expected: all of it is text."""
    while (yield from pieces.more()):
        events.content(pieces.take(len(pieces.text)))
