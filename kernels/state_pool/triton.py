"""The operations of reference.py in Triton, with one launch each. Memory is read and written 16 bytes at a time."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv

# The configurations to choose from, the default first: four accesses of 16 bytes per thread. BLOCK: words of 4 bytes.
CANDIDATES = [KernelConfig({"BLOCK": block}, warps) for block, warps in [(2048, 4), (1024, 4), (4096, 4), (4096, 8)]]


def copy(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Compute reference.copy."""
    _move(pool, pool, sources, targets, len(targets))


def clear(pool: Tensor, targets: Tensor) -> None:
    """Compute reference.clear."""
    _move(None, pool, None, targets, len(targets))


def gather(pool: Tensor, sources: Tensor) -> Tensor:
    """Compute reference.gather."""
    rows = torch.empty(len(sources), pool.shape[1], dtype=torch.uint8, device=pool.device)
    _move(pool, rows, sources, None, len(rows))
    return rows


def scatter(pool: Tensor, targets: Tensor, rows: Tensor) -> None:
    """Compute reference.scatter."""
    _move(rows, pool, None, targets, len(targets))


def _move(origin: Tensor | None, goal: Tensor, sources: Tensor | None, targets: Tensor | None, rows: int) -> None:
    """Set goal[targets[i]] to origin[sources[i]] for i in [0, rows).

    origin: None writes zeros. sources, targets: None stands for [0, 1, 2, …].
    """
    for tensor in (origin, goal):
        if tensor is not None and (tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.shape[1] % 64):
            raise ValueError(f"not contiguous rows of multiples of 64 bytes: {tensor.dtype} {list(tensor.shape)}")
    words = goal.shape[1] // 4
    config = _config(words, goal.device)
    blocks = cdiv(words, config.blocks["BLOCK"])
    launch(
        _move_words,
        (rows * blocks,),
        *(None if origin is None else origin.view(torch.int32), goal.view(torch.int32), sources, targets),
        config=config,
        WORDS=words,
        BLOCKS=blocks,
    )


@by_shape
def _config(words: int, device: torch.device) -> KernelConfig:
    return config_of("state_pool.move", f"words={words}", device, *CANDIDATES)


@jit
def _move_words(
    origin_ptr,
    goal_ptr,
    sources_ptr,
    targets_ptr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move BLOCK words of one row. The grid's one dimension numbers the blocks of all rows."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    places = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = places < WORDS
    source, target = row, row
    if sources_ptr is not None:
        source = tl.load(sources_ptr + row).to(tl.int64)
    if targets_ptr is not None:
        target = tl.load(targets_ptr + row).to(tl.int64)
    if origin_ptr is None:
        words = tl.zeros([BLOCK], tl.int32)
    else:
        words = tl.load(origin_ptr + source * WORDS + places, inside, other=0)
    tl.store(goal_ptr + target * WORDS + places, words, inside)
