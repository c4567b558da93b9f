"""The sizes of the tiers below the pool, and how many bytes a copy takes in each."""

from dataclasses import dataclass

from baton.actors.storage.lines import HostLines
from baton.actors.tokens import WIDTH

# An upper bound, in bytes, on the header of a state file of any model.
FILE_OVERHEAD = 8192


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The sizes of the tiers below the pool, and of the states and tokens that are copied there."""

    host_bytes: int = 0  # the most bytes that copies in host memory may take
    disk_bytes: int = 0  # the most bytes that files may take; 0: the disk is not used
    state_bytes: int = 1  # bytes of one state
    token_bytes: int = 0  # bytes of one token's keys and values in all layers
    session_slots: int | None = None  # the most slots that states with a session's name may hold; None: any number
    page_size: int = 1  # tokens in a page; host memory holds whole pages
    lines: HostLines | None = None
    """The lines of which a copy in host memory takes a whole number; None: a copy takes as many bytes as it has."""

    def copied_bytes(self, position: int) -> int:
        """Return the bytes of a state at `position` together with the KV of its tokens."""
        return self.state_bytes + self.token_bytes * position

    def memory_bytes(self, position: int, first_page: int = 0) -> int:
        """Return the bytes of host memory that a copy of a state at `position` takes, with KV from `first_page` on."""
        pages = -(-position // self.page_size) - first_page if self.token_bytes else 0
        if self.lines is not None:
            return self.lines.count(pages) * self.lines.nbytes
        return self.state_bytes + self.token_bytes * pages * self.page_size

    def file_bytes(self, position: int) -> int:
        """Return the most bytes that the file of a state at `position` takes."""
        return self.copied_bytes(position) + WIDTH * position + FILE_OVERHEAD


NO_TIERS = TierLimits()
