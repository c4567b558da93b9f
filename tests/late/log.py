"""The log of the late device: what the program did, in program order."""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent

Kind = Literal[
    "launch", "upload", "download", "replay", "wait",
    "host read", "implicit upload", "page lock", "host buffer", "pageable", "unwritten", "misaligned",
]  # fmt: skip
STALLS = {"host read", "implicit upload", "page lock"}
FAULTS = {*STALLS, "host buffer", "pageable", "unwritten", "misaligned"}


@dataclass(frozen=True)
class Entry:
    """One entry of the log."""

    kind: Kind
    what: str  # name of the operation, kernel or waiting thread, or a description of the fault
    where: str  # the lines of this repository that led to the entry

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, at {self.where}"


class Fault(AssertionError):
    """A use of the device that would stall a real one, or that gives wrong results on a real one now and then."""


def where(depth: int = 4) -> str:
    """Return the innermost lines of this repository on the call stack, without those of the late device itself."""
    lines = list[str]()
    frame: FrameType | None = sys._getframe(1)
    while frame and len(lines) < depth:
        if file := _shown(frame.f_code.co_filename):
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


@cache
def _shown(file: str) -> str:
    """Return a file's path in this repository, or "" if it is outside of it or part of the late device."""
    path = Path(file)
    own = path.parent == HERE and not path.name.startswith("test_")
    return "" if own or not path.is_relative_to(ROOT) or "site-packages" in file else str(path.relative_to(ROOT))
