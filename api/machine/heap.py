"""The heap of the C library: its free memory is returned to the system after large requests."""

import ctypes
import sys
from collections.abc import Callable

WORTH_A_TRIM = 2**24  # bytes that must have been freed; trimming takes about 0.1 ms for each MiB that it returns


class FreedMemory:
    """A watch over bytes in use, which decides when the heap is worth trimming.

    glibc by itself returns only the end of the heap. A small object there keeps all free memory before it resident.
    """

    def __init__(self) -> None:
        self._most = 0  # most bytes in use since the last trim
        self._seen = False  # the last look has found enough freed bytes

    def grow(self, used: int) -> None:
        """Note how many bytes are in use. Call this whenever they become more."""
        self._most = max(self._most, used)

    def is_worth_a_trim(self, used: int) -> bool:
        """Return whether enough bytes were freed, and were so at the last look: what counted may be freed later."""
        seen, self._seen = self._seen, self._most - used >= WORTH_A_TRIM
        if seen and self._seen:
            self._most, self._seen = used, False
            return True
        return False


def find_trim() -> Callable[[], None]:
    """Return a function that returns the heap's free memory to the system; without glibc it does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return (lambda: None) if trim is None else (lambda: trim(0))
