"""Bounds of rounding errors: the tolerances of the kernels' tests, from the number of terms and the dtype alone.

Machines differ in the length of their vectors and in fused multiply-add, and so in the order in which terms are added.
The bounds hold for any order, so for any machine.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FUNCTION = 4
"""Terms that one exponential, logarithm, root or division counts as: its error is at most two units in the last place.
A function of several of them, such as a sigmoid, counts as the sum of their terms."""
SIGMOID = 2 * FUNCTION + 1
"""Terms of 1 / (1 + e^-x), of silu(x) = x / (1 + e^-x), and of softplus(x) = log(1 + e^x)."""
DEVIATIONS = 8.0  # λ of `likely`


def unit(dtype: torch.dtype) -> float:
    """Return u, the largest relative error of rounding to the nearest number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return γ_n = n·u / (1 − n·u), a bound that no order of computation exceeds.

    The error of a sum of n products is at most γ_n·Σ|a|·|b|, and the relative error of a product of n rounded factors
    is at most γ_n (Higham, Accuracy and Stability of Numerical Algorithms, second edition, 2002, section 3.1).
    """
    assert 0 <= terms * unit(dtype) < 0.5, f"no digit is certain after {terms} roundings to {dtype}"
    return terms * unit(dtype) / (1 - terms * unit(dtype))


def likely(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return λ·√n·u with λ = DEVIATIONS, for long sums, where γ_n would hide faults.

    If rounding errors are independent with mean 0, a sum of n products exceeds it with a probability of at most
    2·n·e^(−λ²/2), about n·10⁻¹⁴ (Higham and Mary, 2019, A New Approach to Probabilistic Rounding Error Analysis,
    theorem 3.1). If terms have random signs too, partial sums are no larger than the largest result, which then stands
    for Σ|a|·|b| (Higham and Mary, 2020, Sharper Probabilistic Backward Error Analysis for Basic Linear Algebra Kernels
    with Random Data).
    """
    return float(DEVIATIONS * terms**0.5 * unit(dtype))


def norm_terms(width: int) -> int:
    """Return the terms of an RMS norm: half of its sum's terms, as the root halves their error; a root, a quotient, and
    three products.
    """
    return width // 2 + 2 * FUNCTION + 3


def lost_exponent(g: Tensor, chunk_size: int) -> float:
    """Return how many units of rounding the decays e^(γ_i − γ_j) lose, where γ is the running sum of g in a chunk.

    A decay's relative error is the error of γ. Each addition rounds γ by up to a unit of its magnitude. These errors
    are independent, so the root of the sum of their squares counts. It is multiplied by the token's own decay e^g,
    because the error of a decay that vanishes does not count. Adding 0 rounds nothing.
    g: log decays, at most 0, of tokens in the first dimension.
    """
    before = torch.cat([torch.zeros(chunk_size + 1, *g.shape[1:]), g[:-1]]).double()
    sums, rounds = (x.unfold(0, chunk_size + 1, 1) for x in (before.cumsum(0), before != 0))
    return float((((sums - sums[..., :1]) * rounds).square().sum(-1).sqrt() * g.exp() * (g != 0)).max())


def attention_error(query: Tensor, keys: Tensor, values: Tensor, scale: float, tokens: int) -> float:
    """Return the largest likely error of attention over `tokens` tokens, computed in float32.

    The output is a mean of `tokens` values. The relative error of its weights is the error of the scores. A score adds
    up n products: √n roundings, of partial sums that for random signs are about |query|·|key| / √n.
    """
    query_length, key_length = (x.float().nan_to_num(0.0).norm(dim=-1).max() for x in (query, keys))
    scores = scale * float(query_length * key_length)
    return (likely(tokens + 2 * FUNCTION) + likely(1) * scores) * largest(values)


def largest(*tensors: Tensor) -> float:
    """Return the largest finite magnitude in the tensors, at least 1, the magnitude of the inputs that tests draw."""
    return max([1.0, *(float(x.detach().abs().nan_to_num(0.0, posinf=0.0).amax()) for x in tensors if x.numel())])


def assert_within(found: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Assert |found − exact| ≤ bound everywhere. Infinities must be equal; NaN is equal to NaN."""
    assert found.shape == exact.shape
    found, exact = found.detach().double(), exact.detach().double()
    error = (found - exact).abs()
    # A result below the smallest normal number may be flushed to zero.
    near = (error <= bound + torch.finfo(torch.float32).tiny) & error.isfinite()
    wrong = ~(near | (found == exact) | (found.isnan() & exact.isnan()))
    ratio = (error / bound)[wrong]
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, by up to {ratio.max():.3g} times the bound"


def assert_rounded(
    found: Tensor,
    exact: Tensor,
    terms: int,
    size: Tensor | float | None = None,
    by: Callable[[int, torch.dtype], float] = gamma,
) -> None:
    """Assert that two results differ by no more than rounding explains: of `terms` operations, and to their dtypes.

    terms: roundings that a result can contain, one after the other: for a sum, its number of terms.
    size: sum of the terms' magnitudes; by default the result's own, for products and functions without cancellation.
    by: `gamma` or `likely`.

    A float64 result is computed in float64 and others in float32, so each of the two contributes its own error.
    """
    exact_size = exact.double().abs()
    bound = torch.zeros_like(exact_size)
    for result in (found, exact):
        computed = torch.float64 if result.dtype == torch.float64 else torch.float32
        bound += by(terms, computed) * (exact_size if size is None else size) + unit(result.dtype) * exact_size
    assert_within(found, exact, bound)
