"""The log of a session: turns with all their tokens, each linked to the turn that it continues.

The head is the last turn of a log. The history is all tokens up to and including the head's answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from baton.actors.tokens import Tokens, count, cut

TurnStatus: TypeAlias = Literal["completed", "aborted", "timeout", "disconnected", "failed"]
TITLE_LENGTH = 100
ITEM_IDS = "item_ids"  # a message's key for the ids of its items in the Responses API


@dataclass(frozen=True, eq=False, kw_only=True)
class Turn:
    """A turn that has ended. It is immutable, so forks can share it."""

    previous: "Turn | None"  # the turn that this turn continues
    number: int
    request: str  # id of the turn's request
    start: int  # how many tokens of the history this turn keeps; `input` follows after these tokens
    input: Tokens
    output: Tokens
    status: TurnStatus
    finish_reason: str | None
    messages: tuple[dict[str, Any], ...] | None
    """The client's messages, or messages that were put into the session without a request; None if not a chat turn."""
    answer: str | None  # the model's text, including a stop string; None if the model only read the input
    created: int  # Unix time
    cached_tokens: int
    parts: dict[str, Any] | None = None  # the answer as a message, if it has reasoning or calls
    log_bytes: int = field(init=False)  # size of the log up to and including this turn

    def __post_init__(self) -> None:
        text = len(msgspec.json.encode([self.messages, self.answer]))
        text += len(msgspec.json.encode(self.parts)) if self.parts is not None else 0
        before = self.previous.log_bytes if self.previous is not None else 0
        object.__setattr__(self, "log_bytes", before + len(self.input) + len(self.output) + text)

    @property
    def reply(self) -> dict[str, Any] | None:
        """The answer as a message for the chat template."""
        if self.answer is None or self.parts is not None:
            return self.parts
        return {"role": "assistant", "content": self.answer}

    @property
    def own_bytes(self) -> int:
        """The size of this turn in the log, in bytes."""
        return self.log_bytes - (self.previous.log_bytes if self.previous is not None else 0)

    @property
    def end(self) -> int:
        """The length of the history after this turn, in tokens."""
        return self.start + count(self.input) + count(self.output)


def turns(head: Turn | None) -> list[Turn]:
    """Return all turns up to and including `head`, oldest first."""
    return list(backwards(head))[::-1]


def backwards(head: Turn | None) -> Iterator[Turn]:
    """Yield all turns up to and including `head`, newest first."""
    while head is not None:
        yield head
        head = head.previous


def history(head: Turn | None) -> Tokens:
    """Return the tokens of the history after the turn `head`.

    A turn whose `start` is before the end of the previous turn drops the previous tokens from `start` on.
    """
    pieces = []
    limit = head.end if head is not None else 0
    for turn in backwards(head):
        if turn.start < limit:
            pieces.append(cut(turn.input + turn.output, 0, limit - turn.start))
            limit = turn.start
    return b"".join(reversed(pieces))


def chat_messages(head: Turn | None) -> list[dict[str, Any]]:
    """Return the messages of all turns up to `head`, including the model's answers."""
    messages: list[dict[str, Any]] = []
    for turn in turns(head):
        new = [shown(message) for message in turn.messages or ()]
        messages = with_said(messages, new, is_first=turn.end > 0 and not is_fed(turn.previous))
        if turn.reply is not None:
            messages.append(turn.reply)
    return messages


def with_said(before: list[dict[str, Any]], new: list[dict[str, Any]], is_first: bool) -> list[dict[str, Any]]:
    """Return the messages `before` followed by the `new` messages.

    is_first: the model has read no messages yet. System messages at the beginning of `new` are then put before all
    other messages.
    """
    if not before or not is_first:
        return before + new
    count = next((index for index, message in enumerate(new) if message["role"] != "system"), len(new))
    return new[:count] + before + new[count:]


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for the chat template: without the ids of its items."""
    return {name: value for name, value in message.items() if name != ITEM_IDS}


def is_fed(head: Turn | None) -> bool:
    """Return whether the model has read any tokens of the session, rather than messages being only put there."""
    return head is not None and head.end > 0


def title(head: Turn | None) -> str | None:
    """Return the beginning of the first user message, or None if there is no such message."""
    texts = (text_of(message) for turn in turns(head) for message in turn.messages or () if message["role"] == "user")
    return next(texts, None)


def text_of(message: dict[str, Any]) -> str:
    """Return the beginning of a message's content, on one line."""
    return " ".join(str(message["content"]).split())[:TITLE_LENGTH]
