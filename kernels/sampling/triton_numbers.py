"""The functions of reference.py for single logits and rows, for Triton's kernels. A rank is a token's sort key, an
int64.
"""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit

WEIGHT_OF_ONE = tl.constexpr(2**40)
LIGHTEST = tl.constexpr(-28.0)  # a scaled logit with weight 0: e^-28 < 2**-40
LOWEST = tl.constexpr(-(2**63))  # below every rank
HIGHEST = tl.constexpr(2**63 - 1)  # above every rank
NO_TOKEN = tl.constexpr(2**31 - 1)  # above every id

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIFORM_UNIT = tl.constexpr(2.0**-53)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # has so few bits that its multiples are exact
_LN2_LOW = tl.constexpr(1.428606765330187e-06)


@jit
def ranks_of(logits, ids):
    """Return sort keys, int64, all different in a row and ordered by (logit ascending, id descending).

    A NaN is the greatest. The upper 32 bits hold the logit, the lower 31 the inverted id.
    """
    return lowest_ranks_of(logits) + (ids ^ NO_TOKEN).to(tl.int64)


@jit
def lowest_ranks_of(logits):
    """Return the lowest rank that a token with each of these logits can have."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return bits.to(tl.int64) << 32


@jit
def ids_of(ranks):
    """Return the ids that ranks contain."""
    return (ranks & NO_TOKEN) ^ NO_TOKEN


@jit
def logits_of(ranks):
    """Return the logits that ranks contain; 0.0 for -0.0."""
    bits = (ranks >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def is_finite(x):
    """Return whether x is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@jit
def scaled_of(logits, greatest, temperature):
    """Return (logit - greatest) / temperature: at most 0, and ordered like the logits. greatest: finite."""
    return tl.div_rn(logits - greatest, temperature)


@jit
def weights_of(scaled):
    """Return the weights e^scaled, int64, in units of 2**-40. scaled: at most 0.

    All multiply-adds are fused explicitly, so that no compiler's choice makes two kernels round differently.
    """
    x = tl.where(scaled > LIGHTEST, scaled, LIGHTEST)
    halvings = tl.floor(tl.fma(x, _LOG2_E, 0.5))
    x = tl.fma(halvings, -_LN2_HIGH, x)
    x = tl.fma(halvings, -_LN2_LOW, x)
    # The polynomial of SLEEF's expf: e^x for |x| <= ln(2) / 2, within one unit in the last place.
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
    """Return the least weight, int64, that min_p keeps."""
    return (min_p.to(tl.float64) * WEIGHT_OF_ONE).to(tl.int64)


@jit
def top_p_threshold(top_p, mass):
    """Compute reference.top_p_threshold."""
    part = (top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.where(top_p >= 1, mass, tl.minimum(part, mass)), 1)


@jit
def uniform(seed, position):
    """Compute reference.uniform."""
    bits = _mixed(_mixed(seed.to(tl.uint64) + _GAMMA) + (position.to(tl.uint64) + 1) * _GAMMA)
    return (bits >> 11).to(tl.int64).to(tl.float64) * _UNIFORM_UNIT


@jit
def _mixed(x):
    """Apply SplitMix64's output function to uint64 numbers."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)
