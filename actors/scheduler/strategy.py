"""State strategies: how many checkpoint slots a running request holds all the time, and how many it may request."""

from enum import StrEnum

# Most checkpoint slots that one request holds at once under JUST_IN_TIME.
MOST_AT_ONCE = 4


class Strategy(StrEnum):
    """The rule by which a running request requests checkpoint slots."""

    NO_BUFFER = "no_buffer"  # no slots: only the state at the end of a request is kept
    EXTRA_BUFFER = "extra_buffer"  # 2 slots (1 without overlap) at admission, and a new one when one has been used
    EXTRA_BUFFER_LAZY = "extra_buffer_lazy"  # 1 at admission and after each use; 2 while two positions are close
    JUST_IN_TIME = "just_in_time"  # one slot for each position, requested shortly before it


def resident_slots(strategy: Strategy, overlap: bool) -> int:
    """Return how many checkpoint slots a running request holds all the time."""
    match strategy:
        case Strategy.EXTRA_BUFFER:
            return 2 if overlap else 1
        case Strategy.EXTRA_BUFFER_LAZY:
            return 1
        case Strategy.NO_BUFFER | Strategy.JUST_IN_TIME:
            return 0


def max_checkpoint_slots(strategy: Strategy, overlap: bool, positions: int) -> int:
    """Return how many checkpoint slots a request may hold when it will soon pass this many positions to checkpoint."""
    match strategy:
        case Strategy.NO_BUFFER:
            return 0
        case Strategy.EXTRA_BUFFER:
            return resident_slots(strategy, overlap)
        case Strategy.EXTRA_BUFFER_LAZY:
            return 2
        case Strategy.JUST_IN_TIME:
            return min(positions, MOST_AT_ONCE)


def slots_per_request(strategy: Strategy, overlap: bool) -> int:
    """Return how many slots a running request holds: the slot of its state, and its resident checkpoint slots."""
    return 1 + resident_slots(strategy, overlap)
