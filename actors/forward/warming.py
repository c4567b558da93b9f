"""Warm-up: steps of every kind, so that all kernels are compiled and memory reaches its peak before any request."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from torch import nn

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkCommit, WorkDraft, WorkMask
from baton.actors.forward.step.reporting import LOGITS_ROWS
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack
from baton.kernels.runtime import triton
from baton.models.layers.operations import row_classes

# Request fields that make a row report all kinds of log probabilities, and pool a hidden state.
REPORTING: dict[str, Any] = {"logprobs": 2, "prompt_logprobs_from": 0, "logprob_ids": (0, 0), "pooled": (0, 1)}
# The sampling parameters of each warm-up row, with further fields of its request. Each takes another path of sampling.
KINDS: tuple[tuple[Sampling, dict[str, Any]], ...] = (
    (Sampling(temperature=0.0), {}),
    (Sampling(top_k=2, top_p=0.9), {}),
    (Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={0: 1.0}), REPORTING),
    (Sampling(min_p=0.1), {}),
)
WARM_COPY = 0  # the key of the warm-up's copy in host memory
SHORT = (3, 5, 1)
"""Prompt lengths of the rows after row 0, which has a long prompt."""


def pages_to_warm(longest: int, page_size: int) -> int:
    """Return how many pages `warm_up` can make use of."""
    return sum(-(-(length + 2) // page_size) for length in (longest, *SHORT)) + 1


def warm_up(device: TorchDevice, longest: int, step_tokens: int | None = None) -> None:
    """Run steps and copies of every kind, so that nothing is compiled later.

    - A prompt of `longest` tokens, several prompts at once, and rows that decode, with and without prompts and drafts.
    - A step of prompts of each size in `step_sizes`, up to `step_tokens` (`longest` if None).
    - Each of KINDS that no row of the steps above has.
    - A copy to host memory and back.

    If there are too few pages, rows or slots, prompts are shorter or fewer. The slots and pages of the pools are
    overwritten, so they must not be in use.
    """
    pools, free = device.pools, free_pages(device)
    if pools.pages:
        longest = min(longest, free * pools.page_size - 2)
    if longest < 1:
        return
    kinds = _run_rows(device, longest)
    for tokens in step_sizes(device, max(longest, step_tokens or 0)):
        _run_prompts(device, tokens, longest)
    for sampling, more in KINDS[kinds:]:
        length = min(2, longest)
        _open(device, 0, length, 0, sampling, more)
        device.launch(Work(0, [WorkChunk(0, 0, length, True)], [], [], [])).collect()
        device.launch(Work(0, [], [0], [length], [])).collect()
    _copy(device)


def free_pages(device: TorchDevice) -> int:
    """Return how many pages the warm-up may write to. The last page is for padding."""
    return max(len(device.pools.blocks) - 1, 0)


def step_sizes(device: TorchDevice, most: int) -> list[int]:
    """Return the sizes of the prompt steps to run, in tokens up to `most`: one in each class of `row_classes`.

    One more size makes the head compute LOGITS_ROWS rows, the most that log probabilities of prompts ever need.
    Return no sizes if the model does not run on Triton's kernels.
    """
    if not (isinstance(device.model, nn.Module) and triton.takes(device.pools.slots)):
        return []
    return sorted({*row_classes(device.model, most), min(LOGITS_ROWS + 1, most)})


def _run_prompts(device: TorchDevice, tokens: int, longest: int) -> None:
    """Run a step of prompts with `tokens` tokens together, or as many as the rows, slots and pages can take."""
    pools, free, chunks, first = device.pools, free_pages(device), list[WorkChunk](), 0
    for row in range(max(1, min(device.max_running, len(pools.slots) - 2))):
        room = (free - first) * pools.page_size - 2 if pools.pages else longest
        length = min(tokens, longest, room)
        if length < 1:
            break
        # Log probabilities of longer prompts would take long, and would run the same kernels.
        more = REPORTING if tokens <= LOGITS_ROWS + 1 else {}
        first = _open(device, row, length, first, Sampling(temperature=0.0), more)
        chunks.append(WorkChunk(row, 0, length, True))
        tokens -= length
    device.launch(Work(0, chunks, [], [], [])).collect()


def _open(device: TorchDevice, row: int, length: int, first: int, sampling: Sampling, more: dict[str, Any]) -> int:
    """Open a row for a prompt, with pages from `first` on. Return the first page after them."""
    pages = device.pools.pages_for(length + 2)
    device.clear(row)
    request = Request(str(row), pack([0] * length), length, sampling, Stops(9), **more)
    device.open_row(row, row, row, request, list(range(first, first + pages)))
    return first + pages


def _copy(device: TorchDevice) -> None:
    """Copy a slot and a page to host memory and back."""
    pages = [0] if free_pages(device) else []
    device.export(WARM_COPY, 0, pages, device.pools.page_size if pages else 1).collect()
    device.fill(0, WARM_COPY, 0, pages, 0).collect()
    device.drop(WARM_COPY)


def _run_rows(device: TorchDevice, longest: int) -> int:
    """Run a long prompt, short prompts while its row decodes, and a step in which all rows decode.

    Return the number of rows. Row i has KINDS[i].
    """
    pools, free = device.pools, free_pages(device)
    lengths = [longest]
    free -= pools.pages_for(longest + 2)
    for length in SHORT[: max(1, min(device.max_running, len(pools.slots) - 2)) - 1]:
        if length <= longest and (needed := pools.pages_for(length + 2)) <= free:
            lengths.append(length)
            free -= needed
    first = 0
    for row, length in enumerate(lengths):
        first = _open(device, row, length, first, *KINDS[row])
    for work in _works(lengths, len(pools.slots) - 2, device.model.vocab_size):
        device.launch(work).collect()
    if pools.rings:
        for work in _drafting(len(lengths) - 1, lengths[-1] + bool(lengths[1:])):
            device.launch(work).collect()
    return len(lengths)


def _drafting(row: int, position: int) -> Iterator[Work]:
    """Yield a step in which a row feeds a draft after its token at `position`, and one that puts it into the state."""
    yield Work(3, [], [row], [position], [], drafts=[WorkDraft(row, 0, (0,))])
    yield Work(0, [], [], [], [], commits=[WorkCommit(row, 1, position + 2)])


def _works(lengths: list[int], spare_slot: int, vocab_size: int) -> Iterator[Work]:
    """Yield three steps: row 0's prompt; the prompts of the others while row 0 decodes; all rows decode.

    In the last two steps, row 0 has a mask, which comes late in the last one.
    """
    longest, *short = lengths
    masks = [WorkMask(0, bytes([255]) * 4 * -(-vocab_size // 32))]
    checkpoints = [WorkCheckpoint(0, 1, spare_slot)] if spare_slot >= len(lengths) else []
    yield Work(0, [WorkChunk(0, 0, longest, True)], [], [], checkpoints)
    chunks = [WorkChunk(row, 0, length, True) for row, length in enumerate(short, start=1)]
    yield Work(1, chunks, [0], [longest], [], masks)
    late = Future[list[WorkMask]]()
    late.set_result(masks)
    yield Work(2, [], list(range(len(lengths))), [longest + 1, *short], [], late=late)
