"""The last lines of a process's log."""

from pathlib import Path

import pytest

from baton.api.cluster.local import TAIL_BYTES, last_lines

LINE = "a line of 24 characters\n"


@pytest.mark.parametrize(("lines", "shown"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (9, "a\nb\nc\n")])
def test_as_many_lines_as_asked_for(lines: int, shown: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert last_lines(tmp_path / "log", lines) == shown


@pytest.mark.parametrize("more", range(3))
def test_a_long_log_begins_with_a_whole_line(more: int, tmp_path: Path) -> None:
    text = "x" * more + "\n" + LINE * (TAIL_BYTES // len(LINE) + 1)
    (tmp_path / "log").write_text(text)
    assert last_lines(tmp_path / "log", 1_000_000) == LINE * (TAIL_BYTES // len(LINE))


def test_a_line_that_begins_with_the_last_mib_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n" + "y" * (TAIL_BYTES - 1) + "\n")
    assert last_lines(tmp_path / "log", 1) == "y" * (TAIL_BYTES - 1) + "\n"


def test_a_process_without_a_log(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "log", 1) == ""
