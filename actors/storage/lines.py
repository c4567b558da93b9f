"""The lines of host memory: pieces of one size, of which every copy of a state takes a whole number."""

from dataclasses import dataclass

ALIGNMENT = 64  # each line's size is a multiple of this many bytes
LEAST_LINES_A_STATE, MOST_LINES_A_STATE = 4, 8
"""Bounds of the number of lines that a state takes, unless pages are too large for that.

Larger lines waste more of a copy's last line; smaller lines need more transfers for each copy.
"""


@dataclass(frozen=True, slots=True)
class HostLines:
    """How copies are cut into lines. Any free line fits any copy, so memory that a copy frees is reused completely."""

    nbytes: int  # bytes of a line
    state_bytes: int  # bytes of a state
    page_bytes: int  # bytes of a page; 0 without KV

    @classmethod
    def fitting(cls, state_bytes: int, page_bytes: int) -> "HostLines":
        """Return lines of whole pages, of the size within the bounds that wastes the least of a state's last line."""
        if not page_bytes:
            return cls(_aligned(state_bytes), state_bytes, 0)
        least, most = (
            max(state_bytes // (page_bytes * lines), 1) for lines in (MOST_LINES_A_STATE, LEAST_LINES_A_STATE)
        )
        sizes = [_aligned(pages * page_bytes) for pages in range(least, most + 1)]
        return cls(min(sizes, key=lambda size: -state_bytes % size), state_bytes, page_bytes)

    @property
    def state(self) -> int:
        """The number of lines that a state takes."""
        return -(-self.state_bytes // self.nbytes)

    @property
    def pages(self) -> int:
        """The number of pages in a line; 0 without KV."""
        return self.nbytes // self.page_bytes if self.page_bytes else 0

    def count(self, pages: int) -> int:
        """Return how many lines a state and `pages` pages take together."""
        return self.state + (-(-pages // self.pages) if pages else 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
