"""The policies that are compared: what they checkpoint, and what goes where slots are short."""

from collections.abc import Callable
from dataclasses import dataclass

from actors.cache.worth.order import Policy as Order
from actors.kinds import Kind
from actors.requests import Request
from actors.scheduler.plan import checkpoint_positions
from actors.tokens import count

GRID = 4  # in units: 64 tokens

Positions = Callable[[Request, int | None], dict[int, Kind]]


def on_grid(request: Request, branch: int | None) -> dict[int, Kind]:
    """One snapshot a prefill, at the last multiple of 64 tokens below its end."""
    return {(count(request.tokens) - 1) // GRID * GRID: Kind.CHECKPOINT}


@dataclass(frozen=True)
class Policy:
    """order: what goes next. positions: what is checkpointed."""

    order: Order
    positions: Positions = checkpoint_positions


POLICIES = {
    "worth": Policy("worth"),
    "lru": Policy("lru"),
    "snapshot-grid": Policy("lru", on_grid),
}
