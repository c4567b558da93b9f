"""The tour shows the code as it is: each quoted piece is found, line by line, in the function that it names."""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.md"
STOPS, MOST_LINES, PIECE_LINES = 12, 300, range(8, 16)
ELISION = "..."


class Piece(NamedTuple):
    file: str
    function: str
    lines: list[str]


def pieces() -> list[Piece]:
    """Return the code blocks of the tour. The first line of each names the file and function that it quotes."""
    blocks = re.findall(r"```python\n# (\S+):(\S+)\n(.*?)```", TOUR.read_text(encoding="utf-8"), re.DOTALL)
    return [Piece(file, function, code.splitlines()) for file, function, code in blocks]


def source_of(file: str, function: str) -> list[str]:
    """Return the lines of a function or method, without their indentation."""
    source = (ROOT / file).read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(source).body
    for name in function.split("."):
        [found] = [node for node in body if getattr(node, "name", None) == name]
        body = getattr(found, "body", [])
    segment = ast.get_source_segment(source, found, padded=True)
    assert segment is not None
    return textwrap.dedent(segment).splitlines()


def is_cut_from(lines: list[str], source: list[str]) -> bool:
    """Return whether `lines` are consecutive lines of `source`; a line `...` stands for any number of lines."""
    at, may_skip = 0, True
    for line in lines:
        if line.strip() == ELISION:
            may_skip = True
            continue
        while may_skip and at < len(source) and source[at] != line:
            at += 1
        if at >= len(source) or source[at] != line:
            return False
        at, may_skip = at + 1, False
    return True


@pytest.mark.parametrize("piece", pieces(), ids=lambda piece: piece.function)
def test_the_code_of_the_tour_is_the_code_that_runs(piece: Piece) -> None:
    assert len(piece.lines) in PIECE_LINES
    assert is_cut_from(piece.lines, source_of(piece.file, piece.function))


def test_the_tour_has_twelve_stops_and_an_end() -> None:
    tour = TOUR.read_text(encoding="utf-8")
    stops = re.split(r"^## (?=\d+\.)", tour, flags=re.MULTILINE)[1:]
    assert [int(stop.partition(".")[0]) for stop in stops] == list(range(1, STOPS + 1))
    assert all("Notice" in stop for stop in stops) and len(pieces()) == STOPS
    assert tour.count("\n") <= MOST_LINES and "You may stop here" in stops[-1]


def test_a_piece_that_has_changed_is_found() -> None:
    source = ["def f():", "    a = 1", "    b = 2", "    return a + b"]
    assert is_cut_from(["def f():", "    ...", "    return a + b"], source)
    assert not is_cut_from(["def f():", "    return a + b"], source)
    assert not is_cut_from(["def f():", "    ...", "    return b + a"], source)
