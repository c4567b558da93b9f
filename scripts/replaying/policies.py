"""The compared policies: what they checkpoint, and what they evict if slots are short."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.actors.cache.worth.order import Policy as Order
from baton.actors.kinds import Kind
from baton.actors.requests import Request
from baton.actors.scheduler.plan import checkpoint_positions
from baton.actors.tokens import count

GRID = 4  # in units: 64 tokens

Positions = Callable[[Request, int | None], dict[int, Kind]]


@dataclass(frozen=True)
class Policy:
    """A cache policy."""

    order: Order  # of eviction
    grid: int | None = None  # keep only one snapshot per prefill, at a multiple of this many units

    def positions(self, block: int) -> Positions:
        """Return the function that chooses checkpoints.

        block: units of a block of the workload. No request can resume within a block, so the grid is not finer.
        """
        return checkpoint_positions if self.grid is None else last_multiple(max(self.grid, block))


def last_multiple(grid: int) -> Positions:
    """Checkpoint at the last multiple of `grid` before the prompt's end."""
    return lambda request, branch: {(count(request.tokens) - 1) // grid * grid: Kind.CHECKPOINT}


POLICIES = {
    "worth": Policy("worth"),
    "lru": Policy("lru"),
    "snapshot-grid": Policy("lru", GRID),
}
