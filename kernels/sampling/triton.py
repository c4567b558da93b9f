"""The draws of reference.py in Triton, without sorting the vocabulary.

The kernels, in the order of their launches. Unless a kernel has one program per row, several programs split the row's
vocabulary:
1. _find_best: the greatest logit of each split.
2. _weigh: the sum of each split's weights. If top_k or top_p cut the row, also the number of tokens in each of BINS
   bins, which are ranges of the distance from the greatest logit.
3. _narrow, if some row is cut, one program per row: derives from these numbers in which bins the cut can be.
4. _list, if some row is cut: lists the tokens of these bins if they are few, and sums the weights above them.
5. draw, one program per row: finds the cut, by sorting the list if it is short and by bisection otherwise, and draws.

All sums are sums of integers, so a draw depends neither on the splits nor on other rows of the batch.
"""

from functools import cache

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.sampling.reference import Sampled, SamplingTensors
from baton.kernels.sampling.triton_cut import (
    BINS,
    NO_LIMIT,
    bins_of,
    in_word,
    limit_of,
    narrowed,
    ones_of,
    store_counts,
)
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

SPLIT_CONFIG = KernelConfig({"SPLIT": 4096}, warps=8)
BEST_CONFIG = KernelConfig(warps=1)
NARROW_CONFIG = KernelConfig(warps=4)
DRAW_CONFIG = KernelConfig({"LIST": 16384, "SORT": 512, "CHUNK": 512}, warps=8)


@by_shape
def _split_config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.split", f"vocab={vocab}", device, SPLIT_CONFIG, *split_candidates())


@cache
def _weigh_config(split: int) -> KernelConfig:
    """Return the configuration of _weigh with counts: each thread has 4 neighbouring logits of each part."""
    return KernelConfig({"SPLIT": split}, warps=max(1, split // 1024))


@by_shape
def _draw_config(vocab: int, device: torch.device) -> KernelConfig:
    return config_of("sampling.draw", f"vocab={vocab}", device, DRAW_CONFIG, *draw_candidates())


def split_candidates() -> list[KernelConfig]:
    """Return the configurations to choose from for kernels that split the vocabulary. SPLIT: tokens of one split."""
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

    A flag of `params` that is None is not computed from the tensors, because that would wait for the device. Instead,
    the kernels for both of its values are launched.

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
    sums, bounds = torch.empty_like(best), (temperature, top_k, top_p, min_p)
    narrowing: tuple[Tensor | None, ...] = None, None, None, None
    if params.any_truncated is False:
        launch(_weigh, (rows, splits), logits, best, *bounds, sums, None, config=config, **row_constants, PARTS=1)
    else:
        counts = best.new_empty(rows, splits, BINS.value // 4)
        weighed, weigh_config = (logits, best, *bounds, sums, counts), _weigh_config(config.blocks["SPLIT"])
        launch(_weigh, (rows, splits), *weighed, config=weigh_config, **row_constants, PARTS=8)
        spans = best.new_empty(rows, 2, dtype=torch.int32), best.new_empty(rows, splits, dtype=torch.int32)
        of_rows = *bounds[:3], best, sums, counts.view(torch.int16), *spans
        launch(_narrow, (rows,), *of_rows, config=NARROW_CONFIG, **row_constants)
        above, ranks = best.new_empty(rows, splits, 2), best.new_empty(rows, draw_config.blocks["LIST"])
        narrowing = *spans, above, ranks
        launch(
            _list,
            (rows, splits),
            logits,
            best,
            *bounds,
            *narrowing,
            config=config,
            **row_constants,
            LIST=ranks.shape[1],
        )
    arguments = logits, best, *bounds, seed, position, sums, *narrowing, tokens, finite
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
    counts_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sum the weights of one split, and count its tokens in each bin.

    sums_ptr gets the sum of the weights that min_p keeps; for a row that top_k or top_p cut, the sum of all weights.
    counts_ptr gets, for such a row, the tokens of each bin, as store_counts stores them. None: no row is cut.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    greatest = logits_of(best_of(best_ptr, row, SPLITS, LANES))
    if (temperature > 0) & is_finite(greatest):
        row_ptr, sum_ptr = logits_ptr + row * STRIDE, sums_ptr + row * SPLITS + split
        least = least_weight(tl.load(min_p_ptr + row))
        if counts_ptr is None:
            _weigh_split(row_ptr, split, least, greatest, temperature, sum_ptr, None, VOCAB, PARTS, SPLIT)
        else:
            is_cut = (limit_of(tl.load(top_k_ptr + row), VOCAB) < NO_LIMIT) | (tl.load(top_p_ptr + row) < 1)
            if is_cut:
                counts_of_split_ptr = counts_ptr + (row * SPLITS + split) * (BINS // 4)
                _weigh_split(
                    row_ptr, split, 0, greatest, temperature, sum_ptr, counts_of_split_ptr, VOCAB, PARTS, SPLIT
                )
            else:
                _weigh_split(row_ptr, split, least, greatest, temperature, sum_ptr, None, VOCAB, PARTS, SPLIT)


@jit
def _weigh_split(
    logits_ptr,
    split,
    least,
    greatest,
    temperature,
    sum_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store the sum of a split's weights that are at least `least`; if counts_ptr is given, also the split's counts.

    PARTS: in how many parts the split is read, one after the other; 8 if there are counts.
    """
    sums = tl.zeros((SPLIT // PARTS,), tl.int64)
    first, second, third, fourth = sums, sums, sums, sums  # counts of 16 bins each
    for part in tl.static_range(PARTS):
        ids = split * SPLIT + part * (SPLIT // PARTS) + tl.arange(0, SPLIT // PARTS)
        logits = tl.load(logits_ptr + ids, ids < VOCAB, other=float("-inf"))
        scaled = scaled_of(logits, greatest, temperature)
        weights = weights_of(scaled)
        sums += tl.where(weights >= least, weights, 0)
        if counts_ptr is not None:
            bins = bins_of(scaled)
            ones = ones_of(bins, ids < VOCAB)
            first += in_word(ones, bins, 0)
            second += in_word(ones, bins, 1)
            third += in_word(ones, bins, 2)
            fourth += in_word(ones, bins, 3)
    tl.store(sum_ptr, tl.sum(sums, 0))
    if counts_ptr is not None:
        store_counts(counts_ptr, first, second, third, fourth)


@jit
def _narrow(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    sums_ptr,
    counts_ptr,
    range_ptr,
    ends_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the result of `narrowed` for a row that top_k or top_p cut.

    range_ptr: [rows, 2], gets the first and the last bin. ends_ptr: [rows, SPLITS], gets the ends.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    limit = limit_of(tl.load(top_k_ptr + row), VOCAB)
    is_drawn = (temperature > 0) & is_finite(logits_of(best_of(best_ptr, row, SPLITS, LANES)))
    if is_drawn & ((limit < NO_LIMIT) | (top_p < 1)):
        mass, lanes = tl.sum(sums_of(sums_ptr, row, SPLITS, LANES), 0), tl.arange(0, LANES)
        counts_of_row_ptr, threshold = counts_ptr + row * SPLITS * BINS, top_p_threshold(top_p, mass)
        first, last, ends = narrowed(counts_of_row_ptr, limit, threshold, mass, SPLITS, LANES)
        tl.store(range_ptr + 2 * row, first)
        tl.store(range_ptr + 2 * row + 1, last)
        tl.store(ends_ptr + row * SPLITS + lanes, ends, lanes < SPLITS)


@jit
def _list(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    range_ptr,
    ends_ptr,
    above_ptr,
    listed_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """List the ranks of the tokens whose bins may contain the cut, in order of their ids, if they are at most LIST.

    above_ptr gets two sums for each split: of its weights in the bins above, and of those among them that min_p keeps.
    It is not written if there are no bins above.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    limit = limit_of(tl.load(top_k_ptr + row), VOCAB)
    greatest = logits_of(best_of(best_ptr, row, SPLITS, LANES))
    if (temperature > 0) & is_finite(greatest) & ((limit < NO_LIMIT) | (top_p < 1)):
        first, last = tl.load(range_ptr + 2 * row), tl.load(range_ptr + 2 * row + 1)
        ends_of_row_ptr = ends_ptr + row * SPLITS
        place, end = tl.load(ends_of_row_ptr + split - 1, split > 0, other=0), tl.load(ends_of_row_ptr + split)
        if (tl.load(ends_of_row_ptr + SPLITS - 1) <= LIST) & ((place < end) | (first > 0)):
            least = least_weight(tl.load(min_p_ptr + row))
            above = tl.zeros((SPLIT // 4,), tl.int64)
            above_least = above
            # One quarter after the other: more programs run at a time, because each needs fewer registers.
            for start in range(split * SPLIT, split * SPLIT + SPLIT, SPLIT // 4):
                ids = start + tl.arange(0, SPLIT // 4)
                logits = tl.load(logits_ptr + row * STRIDE + ids, ids < VOCAB, other=float("-inf"))
                scaled = scaled_of(logits, greatest, temperature)
                bins = bins_of(scaled)
                is_listed = ((bins >= first) & (bins <= last) & (ids < VOCAB)).to(tl.int32)
                places = place + tl.cumsum(is_listed, 0) - 1
                tl.store(listed_ptr + row * LIST + places, ranks_of(logits, ids), is_listed != 0)
                place += tl.sum(is_listed, 0)
                if first > 0:
                    weights = tl.where(bins < first, weights_of(scaled), 0)
                    above += weights
                    above_least += tl.where(weights >= least, weights, 0)
            if first > 0:
                above_of_split_ptr = above_ptr + 2 * (row * SPLITS + split)
                tl.store(above_of_split_ptr, tl.sum(above, 0))
                tl.store(above_of_split_ptr + 1, tl.sum(above_least, 0))
