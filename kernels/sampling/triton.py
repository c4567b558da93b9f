"""The draws of reference.py in Triton, without sorting the vocabulary.

The kernels, each of which splits a row's vocabulary over several programs except for the last:
1. _find_best: the greatest logit of each split.
2. _weigh: the sum of each split's weights. If top_k or top_p cut the row, also how many tokens lie within each of
   DISTANCES distances from the greatest logit, and their weight.
3. _list, if some row is cut: derives from these numbers a distance within which the cut lies, and lists the tokens
   within it if they are few.
4. draw, one program per row: finds the cut, by sorting the list if it is short and by bisection otherwise, and draws.

All sums are sums of integers, so a draw depends neither on the splits nor on other rows of the batch.
"""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.sampling.reference import Sampled, SamplingTensors
from baton.kernels.sampling.triton_cut import NO_LIMIT, amounts_of, distance, limit_of, narrowed
from baton.kernels.sampling.triton_draw import best_of, draw, sums_of
from baton.kernels.sampling.triton_numbers import (
    LOWEST,
    ids_of,
    is_finite,
    least_weight,
    logits_of,
    ranks_of,
    scaled_of,
    top_p_threshold,
    weights_of,
)

DISTANCES = 16
"""Number of distances from the greatest logit for which tokens are counted."""
SPLIT_CONFIG = KernelConfig({"SPLIT": 4096}, warps=8)
BEST_CONFIG = KernelConfig(warps=1)
DRAW_CONFIG = KernelConfig({"LIST": 16384, "SORT": 512, "CHUNK": 512}, warps=8)


@by_shape
def _split_config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.split", f"vocab={vocab}", device, SPLIT_CONFIG, *split_candidates())


@by_shape
def _draw_config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.draw", f"vocab={vocab}", device, DRAW_CONFIG, *draw_candidates())


def split_candidates() -> list[KernelConfig]:
    """Return the configurations of the kernels with splits to choose from. SPLIT: tokens of one split."""
    return [KernelConfig({"SPLIT": split}, warps=warps) for split in (1024, 2048, 4096, 8192) for warps in (4, 8)]


def draw_candidates() -> list[KernelConfig]:
    """Return the configurations of `draw` to choose from.

    LIST: maximum tokens that are listed. SORT: maximum tokens that are sorted. CHUNK: tokens that a program reads at a
        time.
    """
    chunks = (256, 512, 1024)
    return [
        KernelConfig({"LIST": 16384, "SORT": 512, "CHUNK": chunk}, warps=warps) for chunk in chunks for warps in (4, 8)
    ]


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """Compute reference.sample. Logits may be strided in their first dimension.

    A flag of `params` that is None is not read from the tensors; the kernels for all cases are launched instead.

    The exponential is exact to one unit in the last place, as torch's is, but not identical to torch's. So weights may
    have a relative difference of 2**-22, and a draw differs from the reference's if its uniform number is that close to
    the boundary between two tokens.
    """
    rows, vocab = logits.shape
    config = _split_config(vocab, logits.device)
    splits = cdiv(vocab, config.blocks["SPLIT"])
    split_constants = {"SPLITS": splits, "LANES": next_power_of_2(splits)}
    row_constants = {"VOCAB": vocab, "STRIDE": logits.stride(0), **split_constants}
    best = logits.new_empty(rows, splits, dtype=torch.int64)
    tokens, finite = best.new_empty(rows), best.new_empty(rows, dtype=torch.bool)
    launch(_find_best, (rows, splits), logits, best, config=config, **row_constants)
    if params.all_greedy:
        launch(_take_best, (rows,), best, tokens, finite, config=BEST_CONFIG, **split_constants)
        return Sampled(tokens, finite)

    draw_config = _draw_config(vocab, logits.device)
    temperature, top_k, top_p, min_p, seed, position = (
        values.contiguous()
        for values in (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position)
    )
    sums, within, listed = torch.empty_like(best), None, None
    if params.any_truncated is not False:
        within = best.new_empty(rows, splits, DISTANCES)
        listed = best.new_empty(rows, draw_config.blocks["LIST"], dtype=torch.int32)
    bounds = temperature, top_k, top_p, min_p
    row_constants["DISTANCES"] = DISTANCES
    launch(_weigh, (rows, splits), logits, best, *bounds, sums, within, config=config, **row_constants)
    if listed is not None:
        launch(
            _list,
            (rows, splits),
            logits,
            best,
            *bounds,
            sums,
            within,
            listed,
            config=config,
            **row_constants,
            LIST=listed.shape[1],
        )
    arguments = logits, best, *bounds, seed, position, sums, within, listed, tokens, finite
    launch(draw, (rows,), *arguments, config=draw_config, **row_constants, SPLIT=config.blocks["SPLIT"])
    return Sampled(tokens, finite)


@jit
def _find_best(
    logits_ptr,
    best_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Find the highest rank of one split: its greatest logit, the lowest id on a tie."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    logits = tl.load(logits_ptr + row * STRIDE + ids, ids < VOCAB, other=float("-inf"))
    tl.store(best_ptr + row * SPLITS + split, tl.max(tl.where(ids < VOCAB, ranks_of(logits, ids), LOWEST), 0))


@jit
def _take_best(best_ptr, tokens_ptr, finite_ptr, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """Write a greedy row's token, and whether its greatest logit is finite."""
    row = tl.program_id(0).to(tl.int64)
    best = best_of(best_ptr, row, SPLITS, LANES)
    tl.store(tokens_ptr + row, ids_of(best))
    tl.store(finite_ptr + row, is_finite(logits_of(best)))


@jit
def _weigh(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sums_ptr,
    within_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    DISTANCES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sum the weights of one split, and count its tokens within each distance.

    sums_ptr gets the sum of the weights that min_p keeps; for a row that top_k or top_p cut, the sum of all weights.
    within_ptr gets, for such a row, the tokens within each distance and their weight (amounts_of). None: no row is cut.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    greatest = logits_of(best_of(best_ptr, row, SPLITS, LANES))
    if (temperature > 0) & is_finite(greatest):
        ids = split * SPLIT + tl.arange(0, SPLIT)
        logits = tl.load(logits_ptr + row * STRIDE + ids, ids < VOCAB, other=float("-inf"))
        scaled = scaled_of(logits, greatest, temperature)
        weights = weights_of(scaled)
        least = least_weight(tl.load(min_p_ptr + row))
        if within_ptr is not None:
            is_cut = (limit_of(tl.load(top_k_ptr + row), VOCAB) < NO_LIMIT) | (tl.load(top_p_ptr + row) < 1)
            least = tl.where(is_cut, 0, least)
            if is_cut:
                amounts = tl.where(ids < VOCAB, amounts_of(weights), 0)
                for index in tl.static_range(DISTANCES):
                    sum = tl.sum(tl.where(scaled >= distance(index, DISTANCES), amounts, 0), 0)
                    tl.store(within_ptr + (row * SPLITS + split) * DISTANCES + index, sum)
        tl.store(sums_ptr + row * SPLITS + split, tl.sum(tl.where(weights >= least, weights, 0), 0))


@jit
def _list(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sums_ptr,
    within_ptr,
    listed_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    DISTANCES: tl.constexpr,
    LIST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """List the ids, ascending, of the tokens within the distance that contains the cut, if they are at most LIST."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    limit = limit_of(tl.load(top_k_ptr + row), VOCAB)
    greatest = logits_of(best_of(best_ptr, row, SPLITS, LANES))
    if (temperature > 0) & is_finite(greatest) & ((limit < NO_LIMIT) | (top_p < 1)):
        threshold = top_p_threshold(top_p, tl.sum(sums_of(sums_ptr, row, SPLITS, LANES), 0))
        row_within_ptr = within_ptr + row * SPLITS * DISTANCES
        lowest, counts = narrowed(row_within_ptr, limit, threshold, SPLITS, LANES, DISTANCES)
        if tl.sum(counts, 0) <= LIST:
            ids = split * SPLIT + tl.arange(0, SPLIT)
            logits = tl.load(logits_ptr + row * STRIDE + ids, ids < VOCAB, other=float("-inf"))
            is_within = (scaled_of(logits, greatest, temperature) >= lowest) & (ids < VOCAB)
            before = tl.sum(tl.where(tl.arange(0, LANES) < split, counts, 0), 0)
            places = before + tl.cumsum(is_within.to(tl.int32), 0) - 1
            tl.store(listed_ptr + row * LIST + places, ids, is_within)
