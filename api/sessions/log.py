"""A session's log: its turns, each linked to the one that it went on from, with every token verbatim."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from actors.tokens import Tokens, count, cut

TurnStatus: TypeAlias = Literal["completed", "aborted", "timeout", "disconnected", "failed"]
TITLE_LENGTH = 100


@dataclass(frozen=True, eq=False, kw_only=True)
class Turn:
    """One turn that has ended. It never changes, so that forks share it.

    It went on from the first `start` tokens of the history up to `previous`, and added `input` and `output`.
    messages: what the client said, if it was a turn of chat. answer: the model's text, stop strings included; None if
    the turn only fed its input. parts: the answer as a message, if that is more than its text: with reasoning or calls
    of tools. log_bytes: of all turns up to this one.
    """

    previous: "Turn | None"
    number: int
    request: str
    start: int
    input: Tokens
    output: Tokens
    status: TurnStatus
    finish_reason: str | None
    messages: tuple[dict[str, Any], ...] | None
    answer: str | None
    created: int
    cached_tokens: int
    parts: dict[str, Any] | None = None
    log_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        said = len(msgspec.json.encode([self.messages, self.answer]))
        said += len(msgspec.json.encode(self.parts)) if self.parts is not None else 0
        before = self.previous.log_bytes if self.previous is not None else 0
        object.__setattr__(self, "log_bytes", before + len(self.input) + len(self.output) + said)

    @property
    def reply(self) -> dict[str, Any] | None:
        """The answer, as templates know it."""
        if self.answer is None or self.parts is not None:
            return self.parts
        return {"role": "assistant", "content": self.answer}

    @property
    def own_bytes(self) -> int:
        return self.log_bytes - (self.previous.log_bytes if self.previous is not None else 0)

    @property
    def end(self) -> int:
        """How many tokens the history has after it."""
        return self.start + count(self.input) + count(self.output)


def turns(head: Turn | None) -> list[Turn]:
    """Every turn up to `head`, oldest first."""
    return list(backwards(head))[::-1]


def backwards(head: Turn | None) -> Iterator[Turn]:
    while head is not None:
        yield head
        head = head.previous


def history(head: Turn | None) -> Tokens:
    """The tokens up to and with `head`. A turn that went on from earlier than its predecessor's end cuts that short."""
    pieces = []
    limit = head.end if head is not None else 0
    for turn in backwards(head):
        if turn.start < limit:
            pieces.append(cut(turn.input + turn.output, 0, limit - turn.start))
            limit = turn.start
    return b"".join(reversed(pieces))


def chat_messages(head: Turn | None) -> list[dict[str, Any]]:
    """The messages of a chat, the model's answers included."""
    messages: list[dict[str, Any]] = []
    for turn in turns(head):
        messages += turn.messages or ()
        if turn.reply is not None:
            messages.append(turn.reply)
    return messages


def title(head: Turn | None) -> str | None:
    """What was said first, in short; None where nothing was said in chat."""
    said = (text_of(message) for turn in turns(head) for message in turn.messages or () if message["role"] == "user")
    return next(said, None)


def text_of(message: dict[str, Any]) -> str:
    return " ".join(str(message["content"]).split())[:TITLE_LENGTH]
