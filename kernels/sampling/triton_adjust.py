"""The operations of adjust.py, and reference.apply_masks, in Triton: one launch each for a whole batch."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv

MASKS_CONFIG = KernelConfig({"BLOCK": 2048}, warps=8)
PENALTIES_CONFIG = KernelConfig({"BLOCK": 2048}, warps=8)
ENTRIES_CONFIG = KernelConfig({"BLOCK": 128}, warps=4)


@by_shape
def _penalties_config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.penalties", f"vocab={vocab}", device, PENALTIES_CONFIG, *penalties_candidates())


def penalties_candidates() -> list[KernelConfig]:
    """Return the configurations of the penalties' kernel to choose from."""
    return [KernelConfig({"BLOCK": block}, warps=warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    lines: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Compute adjust.apply_penalties. Logits may be strided in their first dimension; the counts are contiguous."""
    vocab = logits.shape[1]
    config = _penalties_config(vocab, logits.device)
    launch(
        _apply_penalties,
        (len(rows), cdiv(vocab, config.blocks["BLOCK"])),
        *(logits, rows, prompt_seen, output_counts, lines, repetition, presence, frequency),
        config=config,
        VOCAB=vocab,
        STRIDE=logits.stride(0),
    )
    return logits


def apply_bias(logits: Tensor, rows: Tensor, tokens: Tensor, addends: Tensor) -> Tensor:
    """Compute adjust.apply_bias with atomic additions; adjust.apply_bias forbids cases where their order matters."""
    grid = (cdiv(len(rows), ENTRIES_CONFIG.blocks["BLOCK"]),)
    arguments = logits, rows, tokens, addends, len(rows)
    launch(_apply_bias, grid, *arguments, config=ENTRIES_CONFIG, STRIDE=logits.stride(0))
    return logits


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Compute reference.apply_masks. Logits and words may be strided in their first dimension."""
    vocab = logits.shape[1]
    launch(
        _apply_masks,
        (len(rows), cdiv(vocab, MASKS_CONFIG.blocks["BLOCK"])),
        *(logits, rows, words),
        config=MASKS_CONFIG,
        VOCAB=vocab,
        STRIDE=logits.stride(0),
        WIDTH=words.stride(0),
    )
    return logits


def count(output_counts: Tensor, lines: Tensor, tokens: Tensor) -> None:
    """Compute adjust.TokenCounts.add."""
    grid = (cdiv(len(lines), ENTRIES_CONFIG.blocks["BLOCK"]),)
    arguments = output_counts, lines, tokens, len(lines)
    launch(_count, grid, *arguments, config=ENTRIES_CONFIG, STRIDE=output_counts.stride(0))


@jit
def _apply_penalties(
    logits_ptr,
    rows_ptr,
    prompt_seen_ptr,
    output_counts_ptr,
    lines_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalise BLOCK tokens of one row. Only logits of tokens that the row's line has counted are read and written."""
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    line = tl.load(lines_ptr + index) * VOCAB
    counts = tl.load(output_counts_ptr + line + ids, inside, other=0)
    is_seen = inside & ((counts > 0) | (tl.load(prompt_seen_ptr + line + ids, inside, other=0) != 0))
    places = logits_ptr + tl.load(rows_ptr + index) * STRIDE + ids
    logits = tl.load(places, is_seen, other=0.0)
    repetition = tl.load(repetition_ptr + index)
    penalised = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    penalised -= counts.to(tl.float32) * tl.load(frequency_ptr + index)
    penalised -= tl.where(counts > 0, tl.load(presence_ptr + index), 0.0)
    tl.store(places, penalised, is_seen)


@jit
def _apply_bias(logits_ptr, rows_ptr, tokens_ptr, addends_ptr, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Add BLOCK of the `count` addends to their logits."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    rows = tl.load(rows_ptr + places, inside, other=0)
    tokens = tl.load(tokens_ptr + places, inside, other=0)
    addends = tl.load(addends_ptr + places, inside, other=0.0)
    tl.atomic_add(logits_ptr + rows * STRIDE + tokens, addends, inside, sem="relaxed")


@jit
def _apply_masks(
    logits_ptr,
    rows_ptr,
    words_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mask BLOCK tokens of one row. Only forbidden tokens whose logit is neither NaN nor +inf are written."""
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    words = tl.load(words_ptr + index * WIDTH + ids // 32, inside, other=0)
    places = logits_ptr + tl.load(rows_ptr + index) * STRIDE + ids
    is_banned = inside & (((words >> (ids % 32)) & 1) == 0)
    logits = tl.load(places, is_banned, other=0.0)
    tl.store(places, float("-inf"), is_banned & (logits < float("inf")))


@jit
def _count(output_counts_ptr, lines_ptr, tokens_ptr, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Count BLOCK of the `count` tokens, each on its line."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    lines = tl.load(lines_ptr + places, inside, other=0)
    tokens = tl.load(tokens_ptr + places, inside, other=0)
    tl.atomic_add(output_counts_ptr + lines * STRIDE + tokens, 1, inside, sem="relaxed")
