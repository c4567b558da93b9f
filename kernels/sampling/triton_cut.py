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
    logits_of,
    lowest_ranks_of,
    ranks_of,
    scaled_of,
    top_p_threshold,
    weights_of,
)

NO_LIMIT = tl.constexpr(2**31 - 1)
BINS = tl.constexpr(64)
# Scaled logits x are divided into bins by the bits of _OFFSET - x: 8 bins for each power of two up to 32.
_OFFSET = tl.constexpr(0.125)
_OFFSET_BITS = tl.constexpr(0x3E000000)
_CODES = tl.constexpr(2**26)  # the number of floats from _OFFSET to 32
_EVERY_FOURTH = tl.constexpr(0x000F000F000F000F)
_MARGIN = tl.constexpr(10)  # bounds of weights have a margin of 2**-10, more than all roundings


@jit
def limit_of(top_k, VOCAB: tl.constexpr):
    """Return how many tokens top_k leaves, or NO_LIMIT."""
    return tl.where((top_k > 0) & (top_k < VOCAB), top_k, NO_LIMIT)


@jit
def bins_of(scaled):
    """Return the bins of scaled logits, int32. Bin 0 holds the greatest; all logits of weight 0 share a bin."""
    beyond = -tl.where(scaled > LIGHTEST, scaled, LIGHTEST) + _OFFSET
    codes = beyond.to(tl.int32, bitcast=True) - _OFFSET_BITS
    return (codes.to(tl.uint32) // (_CODES // BINS)).to(tl.int32)


@jit
def greatest_of(bins):
    """Return the greatest scaled logit of each bin. bins: int32; BINS is allowed, and is below all bins."""
    return -(bins * (_CODES // BINS) + _OFFSET_BITS).to(tl.float32, bitcast=True) + _OFFSET


@jit
def ones_of(bins, is_counted):
    """Return 16 counts of 4 bits in an int64 for each token: 1 for its bin if is_counted, and 0 for the others.

    Among 16 bins, bin 4i + j is at bits 16j + 4i, so that every fourth count is one of four neighbouring bins.
    """
    return is_counted.to(tl.int64) << ((bins & 3) * 16 + (bins & 12))


@jit
def in_word(ones, bins, WORD: tl.constexpr):
    """Return what ones_of returned if the token's bin is one of the 16 of this word, else 0."""
    return tl.where((bins >> 4) == WORD, ones, 0)


@jit
def store_counts(counts_ptr, first, second, third, fourth):
    """Store the counts of all bins, given sums of what in_word returned, int64 [N], for 8 tokens each.

    counts_ptr: int64 [BINS / 4]; each number gets the counts of four neighbouring bins, 16 bits each.
    """
    # One sum over a tensor of all counts takes fewer barriers than a sum for each.
    parts = tl.join(
        tl.join(_part_of(first, second, third, fourth, 0), _part_of(first, second, third, fourth, 2)),
        tl.join(_part_of(first, second, third, fourth, 1), _part_of(first, second, third, fourth, 3)),
    )
    tl.store(counts_ptr + tl.arange(0, BINS // 4), tl.reshape(tl.sum(parts, 0), (BINS // 4,)))


@jit
def _part_of(first, second, third, fourth, PART: tl.constexpr):
    """Return every fourth count of each word with 16 bits, beginning with count PART: [N, 2, 2]."""
    return tl.join(
        tl.join((first >> (4 * PART)) & _EVERY_FOURTH, (third >> (4 * PART)) & _EVERY_FOURTH),
        tl.join((second >> (4 * PART)) & _EVERY_FOURTH, (fourth >> (4 * PART)) & _EVERY_FOURTH),
    )


@jit
def narrowed(
    counts_ptr,
    limit,
    threshold,
    mass,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the first and the last bin in which the cut can be, and where each split's tokens of these bins end.

    The first is 0 if there is a limit, because top_p then divides what the limit keeps.
    counts_ptr: a row's counts, int16 [SPLITS, BINS]. mass: the sum of the row's weights. The ends are int32
    [LANES], in a list of the tokens of all splits.
    """
    lanes, bins = tl.arange(0, LANES), tl.arange(0, BINS)
    places = lanes[:, None] * BINS + bins[None, :]
    counts = tl.load(counts_ptr + places, (lanes < SPLITS)[:, None], other=0).to(tl.int32)
    of_row = tl.sum(counts, 0)
    # The weight after a bin is known within bounds, since a token weighs at most as much as its bin's greatest logit.
    most, least = weights_of(greatest_of(bins)), weights_of(greatest_of(bins + 1))
    most, least = of_row * (most + (most >> _MARGIN) + 1), of_row * (least - (least >> _MARGIN))
    can_end = tl.sum(most, 0) - tl.cumsum(most, 0) <= mass - threshold
    can_begin = tl.sum(least, 0) - tl.cumsum(least, 0) <= mass - threshold
    has_limit = limit < NO_LIMIT
    can_end = tl.where(has_limit, tl.cumsum(of_row, 0) >= limit, can_end)
    last = tl.min(tl.where(can_end, bins, BINS - 1), 0)
    first = tl.where(has_limit, 0, tl.min(tl.where(can_begin, bins, BINS - 1), 0))
    is_between = (bins >= first) & (bins <= last)
    return first, last, tl.cumsum(tl.sum(tl.where(is_between[None, :], counts, 0), 1), 0)


@jit
def ranked_at(logits_ptr, listed_ptr, is_listed, places, stop):
    """Return the ranks of a row's tokens at these places; LOWEST from `stop` on.

    A place is an index of the row's list of ranks if is_listed, else it is the id of a token.
    """
    is_token = places < stop
    logits = tl.load(logits_ptr + places, is_token & (is_listed == 0), other=float("-inf"))
    ranks = tl.where(is_token, ranks_of(logits, places), LOWEST)
    if listed_ptr is not None:
        listed = tl.load(listed_ptr + places, is_listed & is_token, other=LOWEST)
        ranks = tl.where(is_listed, listed, ranks)
    return ranks


@jit
def weights_at(ranks, greatest, temperature):
    """Return the weights of tokens, given their ranks; 0 for LOWEST."""
    weights = weights_of(scaled_of(logits_of(ranks), greatest, temperature))
    return tl.where(ranks == LOWEST, 0, weights)


@jit
def cut_by_sort(
    listed_ptr,
    stop,
    limit,
    top_p,
    mass,
    mass_above,
    greatest,
    temperature,
    SORT: tl.constexpr,
):
    """Find the cut by sorting the listed tokens: at most SORT, and the cut must be one of them.

    mass: the sum of the row's weights, used if limit is NO_LIMIT. mass_above: the sum of the weights of the tokens
    that rank above the listed ones.
    """
    places = tl.arange(0, SORT)
    ranks = tl.sort(tl.load(listed_ptr + places, places < stop, other=LOWEST), descending=True)
    is_left = tl.arange(0, SORT) < tl.minimum(limit, stop)
    weights = tl.where(is_left, weights_at(ranks, greatest, temperature), 0)
    threshold = top_p_threshold(top_p, tl.where(limit < NO_LIMIT, tl.sum(weights, 0), mass))
    is_kept = is_left & (mass_above + tl.cumsum(weights, 0) - weights < threshold)
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
        ranks = ranked_at(logits_ptr, listed_ptr, is_listed, start + tl.arange(0, CHUNK), stop)
        token_weights = weights_at(ranks, greatest, temperature)
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
    mass_above,
    greatest,
    temperature,
    CHUNK: tl.constexpr,
):
    """Find the cut by bisection over ranks, among the tokens that ranked_at returns.

    lowest_scaled: no token of a lower scaled logit is the cut, or all of them have weight 0.
    mass, mass_above: see cut_by_sort; mass_above is 0 if there is a limit.
    """
    # Rounding is monotone, so this bound is not above the logit of any other token.
    cut = lowest_ranks_of(greatest + 1.001 * lowest_scaled * temperature)
    if limit < NO_LIMIT:
        cut = _reach(logits_ptr, listed_ptr, is_listed, stop, cut, limit, 0, True, greatest, temperature, CHUNK)
        _, mass, _, _ = weigh_from(logits_ptr, listed_ptr, is_listed, stop, cut, 0, greatest, temperature, CHUNK)
    if top_p < 1:
        threshold = top_p_threshold(top_p, mass)
        cut = _reach(
            logits_ptr, listed_ptr, is_listed, stop, cut, threshold, mass_above, False, greatest, temperature, CHUNK
        )
    return cut


@jit
def _reach(
    logits_ptr,
    listed_ptr,
    is_listed,
    stop,
    low,
    bound,
    above,
    COUNTS: tl.constexpr,
    greatest,
    temperature,
    CHUNK: tl.constexpr,
):
    """Return the highest rank at which the tokens of this rank and above reach `bound`; the lowest rank if none does.

    COUNTS: `bound` is a number of tokens, else a sum of weights. low: all tokens that matter have at least this rank.
    above: the number or weight of the tokens above all that ranked_at returns.
    """
    tokens, weight, lowest, _ = weigh_from(
        logits_ptr, listed_ptr, is_listed, stop, low, 0, greatest, temperature, CHUNK
    )
    reaches = above + (tokens if COUNTS else weight) >= bound
    # Invariant: low <= cut < high, where low is the rank of a token and high a token's rank + 1.
    low = lowest
    high = tl.where(reaches, lowest_ranks_of(greatest) + 2**32, low + 1)
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # (low + high) / 2 without overflow.
        tokens, weight, lowest, highest = weigh_from(
            logits_ptr, listed_ptr, is_listed, stop, middle, 0, greatest, temperature, CHUNK
        )
        if above + (tokens if COUNTS else weight) >= bound:
            low = lowest
        else:
            high = highest + 1
    return low
