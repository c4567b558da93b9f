"""Functions of float32 numbers that kernels call. They return NaN for NaN."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit


@jit
def silu(x):
    """Return x·sigmoid(x); the exponential cannot overflow."""
    e = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, e) / (1.0 + e)


@jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)); the exponential cannot overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@jit
def softplus(x):
    """Return log(1 + exp(x)), exact to a few units in the last place even where the result is tiny."""
    e = tl.exp(-tl.abs(x))
    above = 1.0 + e
    # log1p(e): the quotient corrects for what was lost when 1 + e was rounded.
    lost = tl.where(above == 1.0, 1.0, e / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.maximum(x, 0.0) + tl.where(above == 1.0, e, tl.log(above) * lost)


@jit
def clamp(x, low, high):
    """Return min(max(x, low), high), as torch.clamp does."""
    at_least = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at_least, high, propagate_nan=tl.PropagateNan.ALL)
