"""How much room there is below the pool, and what a copy takes of it."""

from dataclasses import dataclass

from baton.actors.tokens import WIDTH

FILE_OVERHEAD = 8192


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bytes for copies in host memory and on disk; bytes of a state, and of one token's KV in all layers.

    session_slots: how many slots of the pool sessions may keep between their turns; None: all.
    page_size: tokens of a page, of which host memory holds whole ones. pinned: host memory is what a GPU copies from by
    itself; torch keeps that in blocks of a power of two.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    state_bytes: int = 1
    token_bytes: int = 0
    session_slots: int | None = None
    page_size: int = 1
    pinned: bool = False

    def copied_bytes(self, position: int) -> int:
        """Of a state and its KV."""
        return self.state_bytes + self.token_bytes * position

    def memory_bytes(self, position: int) -> int:
        """What a copy takes of host memory."""
        tokens = -(-position // self.page_size) * self.page_size
        parts = self.state_bytes, self.token_bytes * tokens
        return sum(map(_power_of_two, parts)) if self.pinned else sum(parts)

    def file_bytes(self, position: int) -> int:
        return self.copied_bytes(position) + WIDTH * position + FILE_OVERHEAD


def _power_of_two(nbytes: int) -> int:
    """The next one, if it is none; 0 of 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


NO_TIERS = TierLimits()
