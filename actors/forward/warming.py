"""Warm-up: steps of every kind, so that everything is compiled and memory has reached its peak before any request."""

from collections.abc import Iterator
from typing import Any

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkMask
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack

# Request fields that make a row report all kinds of log probabilities.
REPORTING: dict[str, Any] = {"logprobs": 2, "prompt_logprobs_from": 0, "logprob_ids": (0, 0)}
# The sampling parameters of each warm-up row, with further fields of its request. Each uses other code of the draw.
KINDS: tuple[tuple[Sampling, dict[str, Any]], ...] = (
    (Sampling(temperature=0.0), {}),
    (Sampling(top_k=2, top_p=0.9), {}),
    (Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={0: 1.0}), REPORTING),
    (Sampling(min_p=0.1), {}),
)
SHORT = (3, 5, 1)
"""Prompt lengths of the rows after row 0, which has a long prompt."""


def pages_to_warm(longest: int, page_size: int) -> int:
    """Return how many pages `warm_up` can make use of."""
    return sum(-(-(length + 2) // page_size) for length in (longest, *SHORT)) + 1


def warm_up(device: TorchDevice, longest: int) -> None:
    """Run a prompt of `longest` tokens, several prompts at once, and rows that decode, with and without prompts.

    If there are too few pages, rows or slots, prompts are shorter or fewer. The slots and pages of the pools are
    overwritten, so they must not be in use.
    """
    pools, free = device.pools, max(len(device.pools.blocks) - 1, 0)  # the last page is for padding
    if pools.pages:
        longest = min(longest, free * pools.page_size - 2)
    if longest < 1:
        return
    lengths = [longest]
    free -= pools.pages_for(longest + 2)
    for length in SHORT[: max(1, min(device.max_running, len(pools.slots) - 2)) - 1]:
        if length <= longest and (needed := pools.pages_for(length + 2)) <= free:
            lengths.append(length)
            free -= needed
    first = 0
    for row, length in enumerate(lengths):
        sampling, more = KINDS[row]
        pages = pools.pages_for(length + 2)
        device.clear(row)
        request = Request(str(row), pack([0] * length), length, sampling, Stops(9), **more)
        device.open_row(row, row, row, request, list(range(first, first + pages)))
        first += pages
    for work in _works(lengths, len(pools.slots) - 2, device.model.vocab_size):
        device.launch(work).collect()


def _works(lengths: list[int], spare_slot: int, vocab_size: int) -> Iterator[Work]:
    """Yield three steps: row 0's prompt; the prompts of the others while row 0 decodes; all rows decode.

    In the last two steps, row 0 has a mask.
    """
    longest, *short = lengths
    masks = [WorkMask(0, bytes([255]) * 4 * -(-vocab_size // 32))]
    checkpoints = [WorkCheckpoint(0, 1, spare_slot)] if spare_slot >= len(lengths) else []
    yield Work(0, [WorkChunk(0, 0, longest, True)], [], [], checkpoints)
    chunks = [WorkChunk(row, 0, length, True) for row, length in enumerate(short, start=1)]
    yield Work(1, chunks, [0], [longest], [], masks)
    yield Work(2, [], list(range(len(lengths))), [longest + 1, *short], [], masks)
