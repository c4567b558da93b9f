"""The output of `baton chat`: sessions, turns, and a model's control characters."""

from typing import Any

from baton.api.terminal.client import EndEvent, PromptCounts, SessionInfo, StateInfo, UsageInfo
from baton.api.terminal.console import printable
from baton.api.terminal.view import ago, figures, session_table


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tö") == "a�[2Jb\n\tö"
    assert printable("\x07\x9b") == "��"


def test_the_list_shows_where_states_are() -> None:
    def session(id: str, **more: Any) -> SessionInfo:
        return SessionInfo(id=id, turn=2, position=80, created_at=1000, **{"status": "idle", **more})

    sessions = [
        session("a", last_turn_at=4000, state=StateInfo("slot", 80)),
        session("b", state=StateInfo("disk", 64)),
        session("c", state=StateInfo("tokens", 0)),
        session("d", status="busy", state=StateInfo("slot", 80)),
        session("e"),
    ]
    _, *rows = session_table(sessions, "b", now=4030).splitlines()
    assert [row[row.index("80") + 2 :].strip() for row in rows] == [
        "just now    slot",
        "50 min ago  disk, to 64",
        "50 min ago  tokens",
        "50 min ago  in a turn",
        "50 min ago  -",
    ]
    assert [row.startswith("*") for row in rows] == [False, True, False, False, False]
    assert [ago(seconds) for seconds in (-5, 59, 60, 7200, 200000)] == [
        "just now", "just now", "1 min ago", "2 h ago", "2 d ago",
    ]  # fmt: skip


def test_the_figures_of_a_turn() -> None:
    def ended(count: int, **more: Any) -> EndEvent:
        usage = UsageInfo(100, count, PromptCounts(90))
        return EndEvent(3, "completed", 100 + count, "stop", usage, **more)

    assert figures(ended(11), 2) == "turn 3 · 11 tokens · 5.0 tokens/s · 90 of 100 reused from the state"
    assert figures(ended(1, resumed_from="disk"), 2).endswith("1 tokens · 90 of 100 reused from the state (disk)")
    again = figures(ended(1, resumed_from="tokens", lost="damaged"), 2)
    assert again.endswith(" reused from the state · the state was damaged")
