"""Checks of stored turns, which find records that have valid checksums, but contents that no server writes."""

from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from baton.actors.tokens import WIDTH, Tokens
from baton.api.sessions.log import Turn
from baton.api.sessions.records import DamagedLogError, TurnRecord


class StoredFunction(Struct):
    """The function of a stored tool call."""

    name: str
    arguments: dict[str, Any] | str  # text if the model's arguments were no JSON object


class StoredCall(Struct):
    """A tool call of a stored message."""

    id: str
    function: StoredFunction


class StoredMessage(Struct):
    """The fields of a stored message that the api reads. Messages may have further fields, for the chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str = ""
    tool_calls: list[StoredCall] = []
    tool_call_id: str = ""
    name: str = ""
    item_ids: list[str] = []


def check_turn(record: TurnRecord, previous: Turn | None) -> None:
    """Check the contents of a turn that continues `previous`. Raises DamagedLogError."""
    history = previous.end if previous is not None else 0
    if record.start > history:
        raise damaged(record, f"it starts at token {record.start} of a history of {history}")
    for name in ("input", "output"):
        check_tokens(record, name, getattr(record, name))
    try:
        # The log's size, and answers with these messages, are computed from their JSON.
        msgspec.json.encode([record.messages, record.parts])
        parts = [record.parts] if record.parts is not None else []
        msgspec.convert([*(record.messages or ()), *parts], list[StoredMessage])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise damaged(record, f"its messages are invalid: {error}") from None


def check_tokens(record: TurnRecord, name: str, tokens: Tokens) -> None:
    """Check the packed tokens of one field. Raises DamagedLogError."""
    if len(tokens) % WIDTH:
        raise damaged(record, f"its {name} has {len(tokens)} bytes, which are no whole tokens")
    lowest = int(np.frombuffer(tokens, dtype=np.int32).min(initial=0))
    if lowest < 0:
        raise damaged(record, f"its {name} has token {lowest}")


def damaged(record: TurnRecord, why: str) -> DamagedLogError:
    """Return the error for an invalid turn."""
    return DamagedLogError(f"turn {record.number} is invalid: {why}")
