"""Residual addition and RMS norm in Triton: equal to the reference."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.norm.rms import reference, triton
from tests.kernels.rounding import assert_rounded, norm_terms


@pytest.mark.parametrize("is_added", [True, False])
@given(rows=st.integers(0, 5), hidden=st.integers(1, 300), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_equals_the_reference(is_added: bool, rows: int, hidden: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    residual, x = torch.randn(2, rows, hidden, generator=generator)
    weight, before = torch.randn(hidden, generator=generator), residual.clone()
    arguments = (residual, x if is_added else None, weight, 1e-3, 0.5, float(seed % 2))
    found, expected = triton.add_rms_norm(*arguments), reference.add_rms_norm(*arguments)
    size = residual.abs() + x.abs()
    assert_rounded(found[0], expected[0], 2, size)
    exact = reference.add_rms_norm(found[0], None, weight, 1e-3, offset=float(seed % 2))[1]
    assert_rounded(found[1], exact, norm_terms(hidden))
    assert torch.equal(residual, before)
