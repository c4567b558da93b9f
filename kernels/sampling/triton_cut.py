"""Where top_k and top_p cut a row: the rank of the last token that they keep.

The cut is the first rank, from the highest down, with which the tokens are `limit` or weigh `threshold`. A token that
weighs nothing is never drawn, so it does not matter on which side of the cut it is.
"""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit
from baton.kernels.sampling.triton_numbers import (
    HIGHEST,
    LIGHTEST,
    LOWEST,
    NO_TOKEN,
    logits_of,
    lowest_ranks_of,
    ranks_of,
    scaled_of,
    top_p_threshold,
    weights_of,
)

NO_LIMIT = tl.constexpr(2**31 - 1)
_COUNT_SHIFT = tl.constexpr(42)
_MASS = tl.constexpr(2**42 - 1)
_WEIGHT_SHIFT = tl.constexpr(18)


@jit
def limit_of(top_k, VOCAB: tl.constexpr):
    """How many tokens top_k leaves, or NO_LIMIT."""
    return tl.where((top_k > 0) & (top_k < VOCAB), top_k, NO_LIMIT)


@jit
def distance(index, DISTANCES: tl.constexpr):
    """Scaled logits, from near the greatest to where nothing weighs anything. Exact, whoever computes it."""
    return (index + 1) * (index + 1) * (LIGHTEST / (DISTANCES * DISTANCES))


@jit
def amounts_of(weights):
    """One token and the least that it weighs, as a number whose sums are sums of both. 2**19 tokens fit."""
    return (tl.full(weights.shape, 1, tl.int64) << _COUNT_SHIFT) + (weights >> _WEIGHT_SHIFT)


@jit
def narrowed(
    within_ptr,
    limit,
    threshold,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    DISTANCES: tl.constexpr,
):
    """A distance that the cut is within, and how many tokens of each split are, int64 [LANES].

    within_ptr: of a row, [SPLITS, DISTANCES], sums of amounts_of.
    """
    lanes, indices = tl.arange(0, LANES), tl.arange(0, DISTANCES)
    places = lanes[:, None] * DISTANCES + indices[None, :]
    within = tl.load(within_ptr + places, (lanes < SPLITS)[:, None], other=0)
    amounts = tl.sum(within, 0)
    masses = (amounts & _MASS) << _WEIGHT_SHIFT
    reaches = tl.where(limit < NO_LIMIT, (amounts >> _COUNT_SHIFT) >= limit, masses >= threshold)
    index = tl.min(tl.where(reaches, indices, DISTANCES - 1), 0)
    chosen = tl.where((indices == index)[None, :], within >> _COUNT_SHIFT, 0)
    return distance(index, DISTANCES), tl.sum(chosen, 1)


@jit
def tokens_at(logits_ptr, listed_ptr, is_listed, places, stop):
    """Ids and logits of a row at these places before stop, of a list of ids if is_listed. Behind it: NO_TOKEN, -inf."""
    ids = tl.where(places < stop, places, NO_TOKEN)
    if listed_ptr is not None:
        listed = tl.load(listed_ptr + places, is_listed & (places < stop), other=NO_TOKEN)
        ids = tl.where(is_listed, listed, ids)
    return ids, tl.load(logits_ptr + ids, places < stop, other=float("-inf"))


@jit
def cut_by_sort(
    logits_ptr,
    listed_ptr,
    stop,
    limit,
    top_p,
    mass,
    greatest,
    temperature,
    SORT: tl.constexpr,
):
    """The cut, which is among the listed, at most SORT of them. mass: of the row, where limit is NO_LIMIT."""
    ids, logits = tokens_at(logits_ptr, listed_ptr, True, tl.arange(0, SORT), stop)
    ranks = tl.sort(tl.where(ids != NO_TOKEN, ranks_of(logits, ids), LOWEST), descending=True)
    is_left = tl.arange(0, SORT) < tl.minimum(limit, stop)
    weights = tl.where(is_left, weights_of(scaled_of(logits_of(ranks), greatest, temperature)), 0)
    threshold = top_p_threshold(top_p, tl.where(limit < NO_LIMIT, tl.sum(weights, 0), mass))
    is_kept = is_left & (tl.cumsum(weights, 0) - weights < threshold)
    return tl.min(tl.where(is_kept, ranks, HIGHEST), 0)


@jit
def weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, greatest, temperature, CHUNK: tl.constexpr):
    """Of the tokens at the cut or above it: their number, what those of them weigh that weigh `least`, the lowest rank.

    And the highest rank below the cut. int64 each, of all places up to stop.
    """
    counts, weights = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int64)
    lowest, highest = tl.full((CHUNK,), HIGHEST, tl.int64), tl.full((CHUNK,), LOWEST, tl.int64)
    for start in range(0, stop, CHUNK):
        ids, logits = tokens_at(logits_ptr, listed_ptr, is_listed, start + tl.arange(0, CHUNK), stop)
        ranks = tl.where(ids != NO_TOKEN, ranks_of(logits, ids), LOWEST)
        added = weights_of(scaled_of(logits, greatest, temperature))
        is_above = ranks >= cut
        counts += is_above.to(tl.int32)
        weights += tl.where(is_above & (added >= least), added, 0)
        lowest = tl.minimum(lowest, tl.where(is_above, ranks, HIGHEST))
        highest = tl.maximum(highest, tl.where(is_above, LOWEST, ranks))
    return tl.sum(counts, 0).to(tl.int64), tl.sum(weights, 0), tl.min(lowest, 0), tl.max(highest, 0)


@jit
def cut_by_bisection(
    logits_ptr,
    listed_ptr,
    is_listed,
    stop,
    lowest_scaled,
    limit,
    top_p,
    mass,
    greatest,
    temperature,
    CHUNK: tl.constexpr,
):
    """Among the tokens of tokens_at. lowest_scaled: a distance that the cut is within, as far as it matters."""
    # Rounding is monotone, so this is not above the logit of any token within the distance.
    cut = lowest_ranks_of(greatest + 1.001 * lowest_scaled * temperature)
    if limit < NO_LIMIT:
        cut = _reach(logits_ptr, listed_ptr, is_listed, stop, cut, limit, True, greatest, temperature, CHUNK)
        _, mass, _, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, 0, greatest, temperature, CHUNK)
    if top_p < 1:
        threshold = top_p_threshold(top_p, mass)
        cut = _reach(logits_ptr, listed_ptr, is_listed, stop, cut, threshold, False, greatest, temperature, CHUNK)
    return cut


@jit
def _reach(
    logits_ptr,
    listed_ptr,
    is_listed,
    stop,
    low,
    bound,
    COUNTS: tl.constexpr,
    greatest,
    temperature,
    CHUNK: tl.constexpr,
):
    """The highest rank of a token such that those from it on are `bound`, or weigh that. If all do not: the lowest."""
    count, weight, lowest, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, low, 0, greatest, temperature, CHUNK)
    reaches = (count if COUNTS else weight) >= bound
    # The cut is at low or above it, and below high: one the rank of a token, the other one above such.
    low = lowest
    high = tl.where(reaches, lowest_ranks_of(greatest) + 2**32, low + 1)
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # Their difference may not fit.
        count, weight, lowest, highest = weigh_from(
            logits_ptr, listed_ptr, is_listed, stop, middle, 0, greatest, temperature, CHUNK
        )
        if (count if COUNTS else weight) >= bound:
            low = lowest
        else:
            high = highest + 1
    return low
