"""How much work something is, in calls: the same on every machine, busy or not."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(work: Callable[[], object], folder: str) -> int:
    """How many functions in the files under `folder` are entered; a generator once for each item."""
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
