"""Counting function calls, a measure of work that does not depend on the machine or its load."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(work: Callable[[], object], folder: str) -> int:
    """Return how many functions in files below `folder` are entered; a generator counts once for each item."""
    calls = 0

    def count_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and f"/{folder}/" in frame.f_code.co_filename

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
