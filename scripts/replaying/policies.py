"""The compared policies. A policy says which states are checkpointed, and which are evicted if slots are short."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.actors.cache.worth.order import Policy as Order
from baton.actors.kinds import Kind
from baton.actors.requests import Request
from baton.actors.scheduler.plan import checkpoint_positions
from baton.actors.tokens import count

GRID = 4  # units between two possible checkpoints: 64 tokens

Positions = Callable[[Request, int | None], dict[int, Kind]]


@dataclass(frozen=True)
class Policy:
    """A cache policy."""

    order: Order  # order of eviction
    grid: int | None = None  # only one checkpoint per prefill, at a multiple of this many units; None: the server's

    def positions(self, block: int) -> Positions:
        """Return the function that chooses checkpoints.

        block: units of a block of the workload. The grid is at least a block, because no request can resume within one.
        """
        return checkpoint_positions if self.grid is None else last_multiple(max(self.grid, block))


def last_multiple(grid: int) -> Positions:
    """Return a function that chooses one checkpoint: the last multiple of `grid` before the prompt's end."""
    return lambda request, branch: {(count(request.tokens) - 1) // grid * grid: Kind.CHECKPOINT}


POLICIES = {
    "worth": Policy("worth"),
    "lru": Policy("lru"),
    "snapshot-grid": Policy("lru", GRID),
}
