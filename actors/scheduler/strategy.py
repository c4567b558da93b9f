"""State strategies: how many checkpoint slots a running request keeps by it, and how many it may ask for."""

from enum import StrEnum

# Checkpoints of one request that are under way at once, at most.
MOST_AT_ONCE = 4


class Strategy(StrEnum):
    """When a running request asks for checkpoint slots.

    no_buffer: never; its state is kept at its end only. extra_buffer: 2 (without overlap 1) at admission, and again
    when one was used. extra_buffer_lazy: 1 in the same way, and a second when two positions come up.
    just_in_time: shortly before each position.
    """

    NO_BUFFER = "no_buffer"
    EXTRA_BUFFER = "extra_buffer"
    EXTRA_BUFFER_LAZY = "extra_buffer_lazy"
    JUST_IN_TIME = "just_in_time"


def resident_slots(strategy: Strategy, overlap: bool) -> int:
    """Checkpoint slots that a request keeps by it all the time."""
    match strategy:
        case Strategy.EXTRA_BUFFER:
            return 2 if overlap else 1
        case Strategy.EXTRA_BUFFER_LAZY:
            return 1
        case Strategy.NO_BUFFER | Strategy.JUST_IN_TIME:
            return 0


def max_checkpoint_slots(strategy: Strategy, overlap: bool, wanted: int) -> int:
    """Checkpoint slots that a request may have when `wanted` positions come up."""
    match strategy:
        case Strategy.NO_BUFFER:
            return 0
        case Strategy.EXTRA_BUFFER:
            return resident_slots(strategy, overlap)
        case Strategy.EXTRA_BUFFER_LAZY:
            return 2
        case Strategy.JUST_IN_TIME:
            return min(wanted, MOST_AT_ONCE)


def slots_per_request(strategy: Strategy, overlap: bool) -> int:
    """State slots that a running request holds: its own and its resident checkpoint slots."""
    return 1 + resident_slots(strategy, overlap)
