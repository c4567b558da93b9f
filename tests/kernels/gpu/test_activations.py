"""Activations in Triton: equal to the references."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.activations import reference, triton
from tests.kernels.rounding import SIGMOID, assert_rounded

FORMS = [(triton.silu_multiply, reference.silu_multiply), (triton.squared_relu, reference.squared_relu)]


@pytest.mark.parametrize(("run", "define"), FORMS)
@given(rows=st.integers(0, 4), half=st.integers(1, 3000), apart=st.integers(0, 9), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_equals_the_reference(
    run: Callable[[Tensor], Tensor], define: Callable[[Tensor], Tensor], rows: int, half: int, apart: int, seed: int
) -> None:
    x = torch.randn(rows, 2 * half + apart, generator=torch.Generator().manual_seed(seed)) * 5
    x[:, 2 * half :] = torch.nan
    found = run(x[:, : 2 * half])
    assert found.is_contiguous()
    assert_rounded(found, define(x[:, : 2 * half]), SIGMOID + 1)


@given(rows=st.integers(0, 4), gates=st.integers(1, 40), sharing=st.sampled_from([1, 3, 100]), apart=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_a_gate_equals_the_reference(rows: int, gates: int, sharing: int, apart: int) -> None:
    width = gates * sharing
    # No gate is below −88, where one implementation returns 0 and another a subnormal number.
    x, gate = 9 * torch.randn(2, rows, width + apart, generator=torch.Generator().manual_seed(width))[..., :width]
    gate = gate[:, :gates]
    assert_rounded(triton.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate), SIGMOID + 1)


@pytest.mark.parametrize(("run", "define"), FORMS)
def test_non_finite_numbers_give_the_references_results(
    run: Callable[[Tensor], Tensor], define: Callable[[Tensor], Tensor]
) -> None:
    x = torch.tensor([[torch.nan, 1e4, -1e4, torch.inf, -1.0, torch.nan, 1.0, 2.0, 1.0, 1.0]])
    assert_rounded(run(x), define(x), SIGMOID + 1)
