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
    # log(1 + e) = 2·artanh(z), at most log 2, whose series needs no logarithm and does not round 1 + e.
    z = e / (2.0 + e)
    square = z * z
    series = 1 / 15
    for odd in tl.static_range(13, 0, -2):
        series = series * square + 1 / odd
    return tl.maximum(x, 0.0) + 2.0 * z * series


@jit
def clamp(x, low, high):
    """Return min(max(x, low), high), as torch.clamp does."""
    at_least = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at_least, high, propagate_nan=tl.PropagateNan.ALL)
