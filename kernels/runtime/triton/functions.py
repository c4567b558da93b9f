"""Functions inside kernels, of float32; a NaN stays one."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit


@jit
def silu(x):
    """x·sigmoid(x), without an exp that overflows."""
    e = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, e) / (1.0 + e)


@jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without an exp that overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@jit
def softplus(x):
    """log(1 + exp(x)), exact to a few units in the last place where it is tiny too."""
    e = tl.exp(-tl.abs(x))
    above = 1.0 + e
    # What was lost in rounding 1 + e is made good by the quotient, as log1p does it.
    lost = tl.where(above == 1.0, 1.0, e / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.maximum(x, 0.0) + tl.where(above == 1.0, e, tl.log(above) * lost)


@jit
def clamp(x, low, high):
    """As torch clamps: min(max(x, low), high)."""
    at_least = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at_least, high, propagate_nan=tl.PropagateNan.ALL)
