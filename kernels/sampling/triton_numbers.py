"""What reference.py computes of one logit or one row, for Triton's kernels."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit

WEIGHT_OF_ONE = tl.constexpr(2**40)
LIGHTEST = tl.constexpr(-28.0)  # e to this weighs nothing.
LOWEST = tl.constexpr(-(2**63))  # Below every rank, as HIGHEST is above.
HIGHEST = tl.constexpr(2**63 - 1)
NO_TOKEN = tl.constexpr(2**31 - 1)  # Above every id.

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_UNIT = tl.constexpr(2.0**-53)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # So few bits that its multiples are exact.
_LN2_LOW = tl.constexpr(1.428606765330187e-06)


@jit
def ranks_of(logits, ids):
    """int64, all different in a row and ordered like (logit ascending, id descending). NaN is the greatest."""
    return lowest_ranks_of(logits) + (ids ^ NO_TOKEN).to(tl.int64)


@jit
def lowest_ranks_of(logits):
    """The ranks below which all logits are less than these."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return bits.to(tl.int64) << 32


@jit
def ids_of(ranks):
    return (ranks & NO_TOKEN) ^ NO_TOKEN


@jit
def logits_of(ranks):
    """Of -0.0 it is 0.0."""
    bits = (ranks >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@jit
def scaled_of(logits, greatest, temperature):
    """At most 0, and ordered like the logits. greatest: finite."""
    return tl.div_rn(logits - greatest, temperature)


@jit
def weights_of(scaled):
    """int64, in units of 2**-40. scaled: at most 0.

    By fused operations only, so that all kernels find the same: none is left for a compiler to fuse or not.
    """
    x = tl.where(scaled > LIGHTEST, scaled, LIGHTEST)
    halvings = tl.floor(tl.fma(x, _LOG2_E, 0.5))
    x = tl.fma(halvings, -_LN2_HIGH, x)
    x = tl.fma(halvings, -_LN2_LOW, x)
    # e^x for |x| <= ln(2) / 2 within one unit in the last place: the polynomial of SLEEF's expf.
    y = tl.fma(x, 0.000198527617612853646278381, 0.00139304355252534151077271)
    y = tl.fma(y, x, 0.00833336077630519866943359)
    y = tl.fma(y, x, 0.0416664853692054748535156)
    y = tl.fma(y, x, 0.166666671633720397949219)
    y = tl.fma(y, x, 0.5)
    y = tl.fma(x * x, y, x) + 1.0
    weight_of_half = ((halvings.to(tl.int32) + (127 + 40)) << 23).to(tl.float32, bitcast=True)
    return tl.where(scaled > LIGHTEST, (y * weight_of_half).to(tl.int64), 0)


@jit
def least_weight(min_p):
    """int64: what min_p keeps weighs at least this."""
    return (min_p.to(tl.float64) * WEIGHT_OF_ONE).to(tl.int64)


@jit
def top_p_threshold(top_p, mass):
    """See reference.top_p_threshold."""
    part = (top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.where(top_p >= 1, mass, tl.minimum(part, mass)), 1)


@jit
def uniform(seed, position):
    """See reference.uniform."""
    bits = _mixed(_mixed(seed.to(tl.uint64) + _GAMMA) + (position.to(tl.uint64) + 1) * _GAMMA)
    return (bits >> 11).to(tl.int64).to(tl.float64) * _UNIFORM_UNIT


@jit
def _mixed(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)
