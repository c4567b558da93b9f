"""A session's log: its turns, each linked to the one that it went on from, with every token verbatim."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from baton.actors.tokens import Tokens, count, cut

TurnStatus: TypeAlias = Literal["completed", "aborted", "timeout", "disconnected", "failed"]
TITLE_LENGTH = 100
ITEM_IDS = "item_ids"


@dataclass(frozen=True, eq=False, kw_only=True)
class Turn:
    """One turn that has ended. It never changes, so that forks share it.

    It went on from the first `start` tokens of the history up to `previous`, and added `input` and `output`.
    messages: what the client said, if it was a turn of chat, or put there without a turn; of which some may tell, under
    ITEM_IDS, the ids that their items have. answer: the model's text, stop strings included; None if
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
        said = [shown(message) for message in turn.messages or ()]
        messages = with_said(messages, said, is_first=turn.end > 0 and not is_fed(turn.previous))
        if turn.reply is not None:
            messages.append(turn.reply)
    return messages


def with_said(before: list[dict[str, Any]], said: list[dict[str, Any]], is_first: bool) -> list[dict[str, Any]]:
    """What is said behind what was said before. is_first: nothing of that was fed; then instructions go ahead of it."""
    if not before or not is_first:
        return before + said
    count = next((index for index, message in enumerate(said) if message["role"] != "system"), len(said))
    return said[:count] + before + said[count:]


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """As templates know it: without the ids that were given to its items."""
    return {name: value for name, value in message.items() if name != ITEM_IDS}


def is_fed(head: Turn | None) -> bool:
    """Whether the model has read anything of it; messages may be put into a session before."""
    return head is not None and head.end > 0


def title(head: Turn | None) -> str | None:
    """What was said first, in short; None where nothing was said in chat."""
    said = (text_of(message) for turn in turns(head) for message in turn.messages or () if message["role"] == "user")
    return next(said, None)


def text_of(message: dict[str, Any]) -> str:
    return " ".join(str(message["content"]).split())[:TITLE_LENGTH]
