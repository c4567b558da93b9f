"""The policies that are compared: what they checkpoint, and what goes where slots are short."""

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
    """order: what goes next. grid: keep one snapshot a prefill, at a multiple of so many units, and no other."""

    order: Order
    grid: int | None = None

    def positions(self, block: int) -> Positions:
        """What is checkpointed. block: a finer grid than the workload's own would keep what nobody can go on from."""
        return checkpoint_positions if self.grid is None else last_multiple(max(self.grid, block))


def last_multiple(grid: int) -> Positions:
    """The last one below the prompt's end."""
    return lambda request, branch: {(count(request.tokens) - 1) // grid * grid: Kind.CHECKPOINT}


POLICIES = {
    "worth": Policy("worth"),
    "lru": Policy("lru"),
    "snapshot-grid": Policy("lru", GRID),
}
