"""Limits of a step's batch and of the pools for it. Their defaults follow from the device."""

from dataclasses import dataclass

from baton.actors.requests import BY_HEAD
from baton.api.config import Config
from baton.models.config import ModelError
from baton.models.loading.heads import NoHeadError

CPU_ROWS, GPU_ROWS = 16, 256  # defaults of --max-running
CPU_STEP_TOKENS = 512  # default of --step-tokens on a CPU
LEAST_GPU_STEP_TOKENS, MOST_GPU_STEP_TOKENS = 2048, 8192  # bounds of its default on a GPU
BYTES_A_STEP_TOKEN = 4 * 2**20
"""Free bytes of a GPU for each token of a step. A token's activations take a small part of that."""
CPU_STATES_A_ROW = 3  # cached states for each request that the pool of a CPU has slots for, at most
MOST_GPU_STATES = 16_384
"""Cached states that the pool of a GPU has slots for, at most: its memory serves no other purpose.

The bound keeps the ledger of slots small if a model's states are tiny.
"""


DRAFTS = 8  # maximum drafts of a request in a step
PREDICTIONS = 4  # maximum tokens that a model's head predicts for a request after a step


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a step's batch, and of the states that are cached for its requests."""

    max_running: int  # maximum requests that run at once, if there are slots for them
    step_tokens: int  # maximum tokens of a step
    drafts: int  # maximum drafts of a request in a step
    predictions: int  # maximum tokens that the model's head predicts for a request after a step
    cached_states: int  # slots for cached states beyond those of requests, at most


def batch_limits(config: Config, is_gpu: bool, free: int, has_head: bool = False) -> BatchLimits:
    """Return the options' limits; an option that is not set gets the default of the device.

    Raises ValueError for an option that this device cannot follow.

    free: bytes that are free on the device after the weights
    has_head: whether the model has a head for multi-token prediction
    """
    default_rows, default_tokens = (GPU_ROWS, gpu_step_tokens(free)) if is_gpu else (CPU_ROWS, CPU_STEP_TOKENS)
    rows = config.max_running if config.max_running is not None else default_rows
    tokens = config.step_tokens if config.step_tokens is not None else default_tokens
    makes_drafts = config.speculation == "ngram" if is_gpu else config.speculation != "off"
    drafts = DRAFTS if makes_drafts else 0
    predictions = PREDICTIONS if drafts and has_head else 0
    return BatchLimits(rows, tokens, drafts, predictions, MOST_GPU_STATES if is_gpu else CPU_STATES_A_ROW * rows)


def wants_head(config: Config, is_gpu: bool) -> bool:
    """Return whether to load the model's head for multi-token prediction, if it has one.

    Raises ValueError if the options ask for the head on a GPU.
    """
    if is_gpu and config.speculation == "mtp":
        raise ValueError("--speculation mtp: the head predicts on a CPU only, so far; a GPU verifies drafts of ngram")
    return not is_gpu and config.speculation in BY_HEAD


def explain_headless(config: Config, why: ModelError) -> list[str]:
    """Return notes about a model that is loaded without its head. why: the error of with_head.

    Raises ValueError if the options ask for the head.
    """
    if config.speculation == "mtp":
        raise ValueError(f"--speculation mtp: {why}") from why
    return [] if isinstance(why, NoHeadError) else [f"no drafts from the model's head: {why}"]


def gpu_step_tokens(free: int) -> int:
    """Return the default of --step-tokens on a GPU with `free` bytes that are free: a power of two."""
    affordable = max(free // BYTES_A_STEP_TOKEN, 1)
    return min(max(1 << affordable.bit_length() - 1, LEAST_GPU_STEP_TOKENS), MOST_GPU_STEP_TOKENS)
