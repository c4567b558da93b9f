"""How much room the tiers have, and how many bytes a copy takes of it."""

from dataclasses import dataclass

from baton.actors.tokens import WIDTH

# An upper bound of a file's header, whatever the model.
FILE_OVERHEAD = 8192


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Room below the pool, and sizes of what is copied there, in bytes."""

    host_bytes: int = 0  # for copies in host memory
    disk_bytes: int = 0  # for files; 0: the disk is not used
    state_bytes: int = 1  # of one state
    token_bytes: int = 0  # of one token's keys and values in all layers
    session_slots: int | None = None  # slots that sessions may keep between their turns; None: all
    page_size: int = 1  # in tokens; host memory holds whole pages
    pinned: bool = False
    """Whether host memory is page-locked, as a GPU needs to copy on its own. torch rounds such blocks up to powers of
    two."""

    def copied_bytes(self, position: int) -> int:
        """Return the bytes of a state at `position` and of the KV of its tokens."""
        return self.state_bytes + self.token_bytes * position

    def memory_bytes(self, position: int) -> int:
        """Return the bytes of host memory that a copy of a state at `position` takes."""
        tokens = -(-position // self.page_size) * self.page_size
        parts = self.state_bytes, self.token_bytes * tokens
        return sum(map(_power_of_two, parts)) if self.pinned else sum(parts)

    def file_bytes(self, position: int) -> int:
        """Return the bytes that a file of a state at `position` takes at most."""
        return self.copied_bytes(position) + WIDTH * position + FILE_OVERHEAD


def _power_of_two(nbytes: int) -> int:
    """Return the least power of two that is not below `nbytes`; 0 for 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


NO_TIERS = TierLimits()
