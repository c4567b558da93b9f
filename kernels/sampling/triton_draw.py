"""The last kernel of sampling: one program per row draws a token, given the weights of the row's splits."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit
from baton.kernels.sampling.triton_cut import (
    NO_LIMIT,
    cut_by_bisection,
    cut_by_sort,
    greatest_of,
    limit_of,
    ranked_at,
    weigh_from,
    weights_at,
)
from baton.kernels.sampling.triton_numbers import LOWEST, NO_TOKEN, ids_of, is_finite, least_weight, logits_of, uniform

PART = tl.constexpr(64)
"""How many listed tokens are added to the sums of their splits at a time."""


@jit
def best_of(best_ptr, row, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """Return the highest rank of a row."""
    lanes = tl.arange(0, LANES)
    return tl.max(tl.load(best_ptr + row * SPLITS + lanes, lanes < SPLITS, other=LOWEST), 0)


@jit
def sums_of(sums_ptr, row, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """Return the sums of a row's splits, int64 [LANES], padded with 0."""
    lanes = tl.arange(0, LANES)
    return tl.load(sums_ptr + row * SPLITS + lanes, lanes < SPLITS, other=0)


@jit
def draw(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    sums_ptr,
    range_ptr,
    ends_ptr,
    above_ptr,
    listed_ptr,
    tokens_ptr,
    finite_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
    LIST: tl.constexpr,
    SORT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw a row's token. range_ptr, ends_ptr, above_ptr and listed_ptr are None if top_k and top_p cut no row."""
    row = tl.program_id(0).to(tl.int64)
    best = best_of(best_ptr, row, SPLITS, LANES)
    greatest, temperature = logits_of(best), tl.load(temperature_ptr + row)
    token = ids_of(best)
    if (temperature > 0) & is_finite(greatest):
        row_ptr = logits_ptr + row * STRIDE
        least = least_weight(tl.load(min_p_ptr + row))
        number = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        sums = sums_of(sums_ptr, row, SPLITS, LANES)
        limit, top_p = limit_of(tl.load(top_k_ptr + row), VOCAB), tl.load(top_p_ptr + row)
        cut = tl.full((), LOWEST, tl.int64)
        if listed_ptr is None:
            token = _draw_by_split(row_ptr, sums, cut, least, number, greatest, temperature, VOCAB, SPLIT, CHUNK)
        else:
            if (limit == NO_LIMIT) & (top_p >= 1):
                token = _draw_by_split(row_ptr, sums, cut, least, number, greatest, temperature, VOCAB, SPLIT, CHUNK)
            else:
                list_ptr, mass, lanes = listed_ptr + row * LIST, tl.sum(sums, 0), tl.arange(0, LANES)
                first, last = tl.load(range_ptr + 2 * row), tl.load(range_ptr + 2 * row + 1)
                count = tl.load(ends_ptr + row * SPLITS + SPLITS - 1)
                is_listed = count <= LIST
                stop = tl.where(is_listed, count, VOCAB)
                has_above = is_listed & (first > 0)
                above_of_row_ptr, is_split = above_ptr + 2 * row * SPLITS, has_above & (lanes < SPLITS)
                mass_above = tl.sum(tl.load(above_of_row_ptr + 2 * lanes, is_split, other=0), 0)
                if count <= SORT:
                    cut = cut_by_sort(list_ptr, stop, limit, top_p, mass, mass_above, greatest, temperature, SORT)
                else:
                    lowest = greatest_of(last + 1)
                    cut = cut_by_bisection(
                        *(row_ptr, list_ptr, is_listed, stop, lowest, limit),
                        *(top_p, mass, mass_above, greatest, temperature, CHUNK),
                    )
                if has_above:
                    remaining = tl.load(above_of_row_ptr + 2 * lanes + 1, is_split, other=0)
                    ends = tl.load(ends_ptr + row * SPLITS + lanes, is_split, other=0)
                    starts = tl.load(ends_ptr + row * SPLITS + lanes - 1, is_split & (lanes > 0), other=0)
                    remaining += _listed_weights(list_ptr, stop, starts, ends, cut, least, greatest, temperature)
                    token = _draw_by_split(
                        row_ptr, remaining, cut, least, number, greatest, temperature, VOCAB, SPLIT, CHUNK
                    )
                else:
                    token = _draw_from(
                        row_ptr, list_ptr, is_listed, stop, cut, least, number, greatest, temperature, CHUNK
                    )
    # The token is NO_TOKEN if no running sum exceeds the target. Another kernel would use that as an index of
    # embeddings.
    tl.store(tokens_ptr + row, tl.minimum(token, VOCAB - 1))
    tl.store(finite_ptr + row, is_finite(greatest))


@jit
def _listed_weights(listed_ptr, stop, starts, ends, cut, least, greatest, temperature):
    """Return, for each split, the sum of the weights of its listed tokens, without those that the cut or min_p drops.

    starts, ends: the range of each split's tokens in the list.
    """
    sums = tl.zeros(starts.shape, tl.int64)
    for start in range(0, stop, PART):
        places = start + tl.arange(0, PART)
        ranks = tl.load(listed_ptr + places, places < stop, other=LOWEST)
        weights = _remaining_weights(ranks, cut, least, greatest, temperature)
        is_of_split = (places[:, None] >= starts[None, :]) & (places[:, None] < ends[None, :])
        sums += tl.sum(tl.where(is_of_split, weights[:, None], 0), 0)
    return sums


@jit
def _draw_by_split(
    logits_ptr,
    sums,
    cut,
    least,
    number,
    greatest,
    temperature,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw from the tokens with a rank of at least `cut` and a weight of at least `least`, given each split's sum.

    The token's split is found first, then the token in it.
    sums: for each split, the sum of these weights, padded with 0. number: uniform in [0, 1).
    """
    target = _target(number, tl.sum(sums, 0))
    split = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, sums.shape[0]) < split, sums, 0), 0)
    start, stop = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, VOCAB)
    return _walk(logits_ptr, None, False, start, stop, target - before, cut, least, greatest, temperature, CHUNK)


@jit
def _draw_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, number, greatest, temperature, CHUNK: tl.constexpr):
    """Draw from the tokens with a rank of at least `cut` and a weight of at least `least`, all of which are at places
    [0, stop).
    """
    _, total, _, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, greatest, temperature, CHUNK)
    start, target = tl.full((), 0, tl.int32), _target(number, total)
    return _walk(logits_ptr, listed_ptr, is_listed, start, stop, target, cut, least, greatest, temperature, CHUNK)


@jit
def _target(number, total):
    """Return number · total, rounded down. It is below the total because no number exceeds 1 - 2**-53."""
    return (number * total.to(tl.float64)).to(tl.int64)


@jit
def _remaining_weights(ranks, cut, least, greatest, temperature):
    """Return the weights of tokens, 0 for tokens that the cut or min_p drops."""
    weights = weights_at(ranks, greatest, temperature)
    return tl.where((ranks >= cut) & (weights >= least), weights, 0)


@jit
def _first_beyond(weights, ids, target):
    """Return the first id at which the cumulative weight exceeds the target; NO_TOKEN if there is none."""
    return tl.min(tl.where(tl.cumsum(weights, 0) > target, ids, NO_TOKEN), 0)


@jit
def _walk(
    logits_ptr,
    listed_ptr,
    is_listed,
    start,
    stop,
    target,
    cut,
    least,
    greatest,
    temperature,
    CHUNK: tl.constexpr,
):
    """Return the first id, int64, at which the running sum of the weights exceeds the target.

    The weight of a token that a filter drops is 0. start, stop: range of the places to look at; a place is an id, or
    an index into the list of ranks.
    """
    token = tl.full((), NO_TOKEN, tl.int32)
    while (token == NO_TOKEN) & (start < stop):
        ranks = ranked_at(logits_ptr, listed_ptr, is_listed, start + tl.arange(0, CHUNK), stop)
        weights = _remaining_weights(ranks, cut, least, greatest, temperature)
        token = _first_beyond(weights, ids_of(ranks).to(tl.int32), target)
        target -= tl.sum(weights, 0)
        start += CHUNK
    return token.to(tl.int64)
