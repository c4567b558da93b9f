"""The search for a row's cut: the rank of the last token that top_k and top_p keep.

Ranks are sort keys (triton_numbers.py:ranks_of). From the highest rank down, the cut is the first rank at which the
number of tokens is `limit` or the sum of their weights reaches `threshold`.
A token of weight 0 is never drawn, so it does not matter on which side of the cut it lies.
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
# An amount is an int64 with a count of tokens in the upper 22 bits, and a weight in units of 2**18 in the lower 42.
_COUNT_SHIFT = tl.constexpr(42)
_MASS = tl.constexpr(2**42 - 1)
_WEIGHT_SHIFT = tl.constexpr(18)


@jit
def limit_of(top_k, VOCAB: tl.constexpr):
    """Return how many tokens top_k leaves, or NO_LIMIT."""
    return tl.where((top_k > 0) & (top_k < VOCAB), top_k, NO_LIMIT)


@jit
def distance(index, DISTANCES: tl.constexpr):
    """Return distance `index` as a scaled logit: from near 0, the greatest logit, to where every weight is 0.

    The result is exact, so that all kernels compute the same number.
    """
    return (index + 1) * (index + 1) * (LIGHTEST / (DISTANCES * DISTANCES))


@jit
def amounts_of(weights):
    """Return the amounts of single tokens: a count of 1, and the weight, rounded down.

    A sum of amounts holds the sums of both parts, for up to 2**19 tokens.
    """
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
    """Return a distance within which the cut lies, and the number of tokens of each split within it, int64 [LANES].

    within_ptr: a row's sums of amounts, [SPLITS, DISTANCES].
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
    """Return the ids and logits of a row at these places; NO_TOKEN and -inf from `stop` on.

    A place is an index of the row's list of ids if is_listed, else it is the id itself.
    """
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
    """Find the cut by sorting the listed tokens: at most SORT, and the cut must be one of them.

    mass: the sum of the row's weights, used if limit is NO_LIMIT.
    """
    ids, logits = tokens_at(logits_ptr, listed_ptr, True, tl.arange(0, SORT), stop)
    ranks = tl.sort(tl.where(ids != NO_TOKEN, ranks_of(logits, ids), LOWEST), descending=True)
    is_left = tl.arange(0, SORT) < tl.minimum(limit, stop)
    weights = tl.where(is_left, weights_of(scaled_of(logits_of(ranks), greatest, temperature)), 0)
    threshold = top_p_threshold(top_p, tl.where(limit < NO_LIMIT, tl.sum(weights, 0), mass))
    is_kept = is_left & (tl.cumsum(weights, 0) - weights < threshold)
    return tl.min(tl.where(is_kept, ranks, HIGHEST), 0)


@jit
def weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, least, greatest, temperature, CHUNK: tl.constexpr):
    """Return four numbers, int64, about the tokens at places [0, stop).

    Three are about tokens with a rank of at least `cut`: their count, the sum of their weights that are at least
    `least`, and their lowest rank. The fourth is the highest rank below `cut`.
    """
    counts, weights = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int64)
    lowest, highest = tl.full((CHUNK,), HIGHEST, tl.int64), tl.full((CHUNK,), LOWEST, tl.int64)
    for start in range(0, stop, CHUNK):
        ids, logits = tokens_at(logits_ptr, listed_ptr, is_listed, start + tl.arange(0, CHUNK), stop)
        ranks = tl.where(ids != NO_TOKEN, ranks_of(logits, ids), LOWEST)
        token_weights = weights_of(scaled_of(logits, greatest, temperature))
        is_above = ranks >= cut
        counts += is_above.to(tl.int32)
        weights += tl.where(is_above & (token_weights >= least), token_weights, 0)
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
    """Find the cut by bisection over ranks, among the tokens that tokens_at returns.

    lowest_scaled: a distance within which the cut lies, unless all tokens beyond the distance have weight 0.
    """
    # Rounding is monotone, so this bound is not above the logit of any token within the distance.
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
    """Return the highest rank at which the tokens of this rank and above reach `bound`; the lowest rank if none does.

    COUNTS: `bound` is a number of tokens, else a sum of weights. low: all tokens that matter have at least this rank.
    """
    count, weight, lowest, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, low, 0, greatest, temperature, CHUNK)
    reaches = (count if COUNTS else weight) >= bound
    # Invariant: low <= cut < high, where low is the rank of a token and high a token's rank + 1.
    low = lowest
    high = tl.where(reaches, lowest_ranks_of(greatest) + 2**32, low + 1)
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # (low + high) / 2 without overflow.
        count, weight, lowest, highest = weigh_from(
            logits_ptr, listed_ptr, is_listed, stop, middle, 0, greatest, temperature, CHUNK
        )
        if (count if COUNTS else weight) >= bound:
            low = lowest
        else:
            high = highest + 1
    return low
