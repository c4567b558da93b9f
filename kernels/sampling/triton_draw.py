"""The last kernel of sampling: one program per row draws a token, given the weights of the row's splits."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit
from baton.kernels.sampling.triton_cut import (
    NO_LIMIT,
    cut_by_bisection,
    cut_by_sort,
    limit_of,
    narrowed,
    tokens_at,
    weigh_from,
)
from baton.kernels.sampling.triton_numbers import (
    LOWEST,
    NO_TOKEN,
    ids_of,
    is_finite,
    least_weight,
    logits_of,
    ranks_of,
    scaled_of,
    top_p_threshold,
    uniform,
    weights_of,
)


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
    within_ptr,
    listed_ptr,
    tokens_ptr,
    finite_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    DISTANCES: tl.constexpr,
    SPLIT: tl.constexpr,
    LIST: tl.constexpr,
    SORT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw a row's token. within_ptr and listed_ptr are None if top_k and top_p cut no row."""
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
        if within_ptr is None:
            token = _draw_from_all(row_ptr, sums, least, number, greatest, temperature, VOCAB, SPLIT, CHUNK)
        else:
            if (limit == NO_LIMIT) & (top_p >= 1):
                token = _draw_from_all(row_ptr, sums, least, number, greatest, temperature, VOCAB, SPLIT, CHUNK)
            else:
                within_of_row_ptr, list_ptr = within_ptr + row * SPLITS * DISTANCES, listed_ptr + row * LIST
                mass = tl.sum(sums, 0)
                threshold = top_p_threshold(top_p, mass)
                lowest, counts = narrowed(within_of_row_ptr, limit, threshold, SPLITS, LANES, DISTANCES)
                count = tl.sum(counts, 0).to(tl.int32)
                is_listed = count <= LIST
                stop = tl.where(is_listed, count, VOCAB)
                if count <= SORT:
                    cut = cut_by_sort(row_ptr, list_ptr, stop, limit, top_p, mass, greatest, temperature, SORT)
                else:
                    cut = cut_by_bisection(
                        row_ptr, list_ptr, is_listed, stop, lowest, limit, top_p, mass, greatest, temperature, CHUNK
                    )
                token = _draw_from(row_ptr, list_ptr, is_listed, stop, cut, least, number, greatest, temperature, CHUNK)
    # NO_TOKEN, if no weight exceeds the target: another kernel would read the embeddings at an index out of range.
    tl.store(tokens_ptr + row, tl.minimum(token, VOCAB - 1))
    tl.store(finite_ptr + row, is_finite(greatest))


@jit
def _draw_from_all(
    logits_ptr,
    sums,
    least,
    number,
    greatest,
    temperature,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw from a row that neither top_k nor top_p cut: find the split of the token, then walk over that split.

    sums: for each split, the sum of the weights that min_p keeps, padded with 0. number: uniform in [0, 1).
    """
    target = _target(number, tl.sum(sums, 0))
    split = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, sums.shape[0]) < split, sums, 0), 0)
    start, stop = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, VOCAB)
    cut = tl.full((), LOWEST, tl.int64)
    return _walk(logits_ptr, None, False, start, stop, target - before, cut, least, greatest, temperature, CHUNK)


@jit
def _draw_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, number, greatest, temperature, CHUNK: tl.constexpr):
    """Draw from the tokens with a rank of at least `cut` and a weight of at least `least`."""
    _, total, _, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, greatest, temperature, CHUNK)
    start, target = tl.full((), 0, tl.int32), _target(number, total)
    return _walk(logits_ptr, listed_ptr, is_listed, start, stop, target, cut, least, greatest, temperature, CHUNK)


@jit
def _target(number, total):
    """Return number · total, rounded down. It is below the total because no number exceeds 1 - 2**-53."""
    return (number * total.to(tl.float64)).to(tl.int64)


@jit
def _remaining_weights(logits, ids, cut, least, greatest, temperature):
    """Return the weights of tokens, 0 for tokens that the cut or min_p drops."""
    weights = weights_of(scaled_of(logits, greatest, temperature))
    return tl.where((ranks_of(logits, ids) >= cut) & (weights >= least), weights, 0)


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
    an index into the list of ids.
    """
    token = tl.full((), NO_TOKEN, tl.int32)
    while (token == NO_TOKEN) & (start < stop):
        ids, logits = tokens_at(logits_ptr, listed_ptr, is_listed, start + tl.arange(0, CHUNK), stop)
        weights = _remaining_weights(logits, ids, cut, least, greatest, temperature)
        token = _first_beyond(weights, ids, target)
        target -= tl.sum(weights, 0)
        start += CHUNK
    return token.to(tl.int64)
