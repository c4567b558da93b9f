"""Formatting of sessions and turns as text for `baton chat`."""

import time
from collections.abc import Sequence

from baton.api.terminal.client import EndEvent, SessionInfo, TurnInfo


def session_table(sessions: Sequence[SessionInfo], current: str | None, now: float | None = None) -> str:
    """Return a table with one numbered line per session; the current one is marked."""
    if not sessions:
        return "There are no sessions."
    now = time.time() if now is None else now
    rows = [("", "", "session", "turn", "tokens", "last used", "state")]
    for number, session in enumerate(sessions, 1):
        mark = "*" if session.id == current else ""
        used = ago(now - max(session.last_turn_at or 0, session.created_at))
        counts = (str(session.turn), str(session.position))
        rows.append((mark, str(number), session.id, *counts, used, place(session)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(aligned, row, widths)).rstrip() for row in rows)


def aligned(cell: str, width: int) -> str:
    """Pad a cell: numbers to the right, other text to the left."""
    return cell.rjust(width) if cell.isdecimal() else cell.ljust(width)


def place(session: SessionInfo) -> str:
    """Return the tier of a session's state, and the state's position if it is before the end of the history."""
    if session.status == "busy":
        return "in a turn"
    if session.state is None:
        return "-"
    short = 0 < session.state.position < session.position
    return f"{session.state.tier}, to {session.state.position}" if short else session.state.tier


def ago(seconds: float) -> str:
    """Return a duration in words, such as "2 h ago"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def transcript(turns: Sequence[TurnInfo]) -> str:
    return "\n".join(map(exchange, turns)) or "There are no turns yet."


def exchange(turn: TurnInfo) -> str:
    """Return a turn's messages, each with the turn's number before it, followed by the answer."""
    lines = []
    for message in turn.messages or ():
        role = "" if message["role"] == "user" else f"({message['role']}) "
        lines.append(f"{turn.turn}> {role}{message['content']}")
    if turn.messages is None:
        lines.append(f"{turn.turn}> ({turn.input_tokens} tokens)")
    if turn.text is not None:
        lines.append(turn.text)
    if turn.status != "completed":
        lines.append(f"[{turn.status}]")
    return "\n".join(lines)


def standing(session: SessionInfo) -> str:
    """Return a line with the session's id, turn and number of tokens."""
    return f"Session {session.id}, turn {session.turn}, {session.position} tokens."


def figures(ended: EndEvent, seconds: float) -> str:
    """Return a line with a turn's statistics. seconds: time from the first token to the last."""
    usage = ended.usage
    parts = [f"turn {ended.turn}", f"{usage.completion_tokens} tokens"]
    if usage.completion_tokens > 1 and seconds > 0:
        parts.append(f"{(usage.completion_tokens - 1) / seconds:.1f} tokens/s")
    source = f" ({ended.resumed_from})" if ended.resumed_from not in ("", "tokens") else ""
    parts.append(f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} reused from the state{source}")
    if ended.lost in ("evicted", "damaged"):
        parts.append(f"the state was {ended.lost}")
    if ended.finish_reason == "length":
        parts.append("cut at the limit")
    return " · ".join(parts)
