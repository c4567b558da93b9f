"""Log probabilities in Triton: one program per split finds best tokens and sums; one per row combines the splits."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.sampling.triton_numbers import LOWEST, ids_of, logits_of, ranks_of

MOST = 32
"""Maximum of `top`, the number of best tokens."""
SPLIT_CONFIG = KernelConfig({"SPLIT": 4096}, warps=8)
JOIN_CONFIG = KernelConfig(warps=4)


@by_shape
def _config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.log_probabilities", f"vocab={vocab}", device, SPLIT_CONFIG, *candidates())


def candidates() -> list[KernelConfig]:
    """Return the configurations of the splits' kernel to choose from."""
    return [KernelConfig({"SPLIT": split}, warps=warps) for split in (2048, 4096, 8192) for warps in (4, 8)]


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute reference.log_probabilities; top is at most MOST.

    Logits may be strided in their first dimension, and each row must have a finite logit. Splits are added in order, so
    the results are batch-invariant.
    """
    rows, vocab = logits.shape
    top = min(top, vocab)
    config = _config(vocab, logits.device)
    splits = cdiv(vocab, config.blocks["SPLIT"])
    best = tokens.new_empty(rows, splits, MOST)
    greatest, sums = logits.new_empty(rows, splits), logits.new_empty(rows, splits)
    split_constants = {"VOCAB": vocab, "STRIDE": logits.stride(0), "SPLITS": splits, "MOST": MOST}
    launch(_best_of_splits, (rows, splits), logits, best, greatest, sums, top, config=config, **split_constants)
    chosen, values, ids = logits.new_empty(rows), logits.new_empty(rows, top), tokens.new_empty(rows, top)
    arguments = logits, tokens, best, greatest, sums, chosen, values, ids, top
    lanes = next_power_of_2(splits)
    row_constants = {"STRIDE": logits.stride(0), "SPLITS": splits, "LANES": lanes, "MOST": MOST}
    launch(_join, (rows,), *arguments, config=JOIN_CONFIG, **row_constants)
    return chosen, values, ids


@jit
def _best_of_splits(
    logits_ptr,
    best_ptr,
    greatest_ptr,
    sums_ptr,
    top,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Find the `top` highest ranks of one split, its greatest logit, and the sum of exp(logit - greatest)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    logits = tl.load(logits_ptr + row * STRIDE + ids, ids < VOCAB, other=float("-inf"))
    greatest = tl.max(logits, 0)
    against = tl.where(greatest == float("-inf"), 0.0, greatest)
    at = row * SPLITS + split
    tl.store(greatest_ptr + at, greatest)
    tl.store(sums_ptr + at, tl.sum(tl.exp(logits - against), 0))
    ranks = tl.where(ids < VOCAB, ranks_of(logits, ids), LOWEST)
    for index in range(top):
        best = tl.max(ranks, 0)
        tl.store(best_ptr + at * MOST + index, best)
        ranks = tl.where(ranks == best, LOWEST, ranks)


@jit
def _join(
    logits_ptr,
    tokens_ptr,
    best_ptr,
    greatest_ptr,
    sums_ptr,
    chosen_ptr,
    values_ptr,
    ids_ptr,
    top,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Combine the splits of one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes, indices = tl.arange(0, LANES), tl.arange(0, MOST)
    greatest = tl.load(greatest_ptr + row * SPLITS + lanes, lanes < SPLITS, other=float("-inf"))
    sums = tl.load(sums_ptr + row * SPLITS + lanes, lanes < SPLITS, other=0.0)
    most = tl.max(greatest, 0)
    normalizer = most + tl.log(tl.sum(sums * tl.exp(greatest - most), 0))
    token = tl.load(tokens_ptr + row)
    tl.store(chosen_ptr + row, tl.load(logits_ptr + row * STRIDE + token) - normalizer)

    places = row * SPLITS * MOST + lanes[:, None] * MOST + indices[None, :]
    inside = (lanes < SPLITS)[:, None] & (indices < top)[None, :]
    ranks = tl.load(best_ptr + places, inside, other=LOWEST)
    for index in range(top):
        best = tl.max(tl.max(ranks, 1), 0)
        tl.store(values_ptr + row * top + index, logits_of(best) - normalizer)
        tl.store(ids_ptr + row * top + index, ids_of(best))
        ranks = tl.where(ranks == best, LOWEST, ranks)
