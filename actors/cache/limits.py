"""How much room there is below the pool, and what a copy takes of it."""

from dataclasses import dataclass

from actors.tokens import WIDTH

FILE_OVERHEAD = 8192


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bytes for copies in host memory and on disk; bytes of a state, and of one token's KV in all layers.

    session_slots: how many slots of the pool sessions may keep between their turns; None: all.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    state_bytes: int = 1
    token_bytes: int = 0
    session_slots: int | None = None

    def memory_bytes(self, position: int) -> int:
        return self.state_bytes + self.token_bytes * position

    def file_bytes(self, position: int) -> int:
        return self.memory_bytes(position) + WIDTH * position + FILE_OVERHEAD


NO_TIERS = TierLimits()
