"""The tolerances of the kernels' tests: any order of a sum is within them, and one missing term is not."""

import pytest
import torch
from torch import Tensor

from tests.kernels.rounding import assert_rounded, assert_within, gamma, likely

F32, BF16 = torch.float32, torch.bfloat16


def products(terms: int) -> Tensor:
    a, b = torch.randn(2, 100, terms, generator=torch.Generator().manual_seed(terms))
    return a * b


@pytest.mark.parametrize("terms", [2, 30, 700])
@pytest.mark.parametrize("by", [gamma, likely])
def test_any_order_of_a_sum_is_within_the_bound_and_a_missing_term_is_not(terms: int, by: type) -> None:
    p = products(terms)
    exact, size = p.double().sum(1), p.double().abs().sum(1)
    for found in (p.sum(1), p.flip(1).cumsum(1)[:, -1], p.sort(1).values.cumsum(1)[:, -1]):
        assert_rounded(found, exact, terms, size, by)
    for short in (p[:, 1:].sum(1), p[:, :-1].sum(1)):
        with pytest.raises(AssertionError, match="times the bound"):
            assert_rounded(short, exact, terms, size, by)


def test_a_result_is_rounded_to_its_dtype_once() -> None:
    exact = products(1)
    assert_rounded(exact.bfloat16(), exact, 0)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_rounded(exact.bfloat16() * (1 + 2**-7), exact, 0)


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_equals_only_itself(odd: float) -> None:
    special, finite = torch.tensor([odd, 1.0]), torch.ones(2)
    assert_rounded(special, special.double(), 3)
    for found, exact in [(special, finite), (finite, special)]:
        with pytest.raises(AssertionError, match="1 of 2 differ"):
            assert_rounded(found, exact, 3)
    with pytest.raises(AssertionError, match="1 of 2 differ"):
        assert_within(torch.tensor([torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0]), torch.inf)
