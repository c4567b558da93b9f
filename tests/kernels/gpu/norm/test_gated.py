"""Gated norm in Triton: equal to the reference."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.norm.gated import reference, triton
from baton.kernels.runtime.triton import chosen
from tests.kernels.rounding import SIGMOID, assert_rounded, norm_terms


@pytest.mark.parametrize("norm_before_gate", [True, False, None])
@given(
    rows=st.integers(0, 5),
    groups=st.integers(1, 4),
    width=st.one_of(st.integers(1, 40), st.sampled_from([128, 300, 1500])),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None)
def test_equals_the_reference(norm_before_gate: bool | None, rows: int, groups: int, width: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    channels = groups * width
    x = torch.randn(rows, channels + 2, generator=g)[:, 2:]
    gate = torch.randn(rows, 2 * channels, generator=g)[:, :channels]
    weight = torch.randn(channels, generator=g)
    # If norm_before_gate is None, there is no norm.
    arguments = (x, gate, None if norm_before_gate is None else weight, 1e-3, groups, bool(norm_before_gate))
    found = triton.gated_norm(*arguments)
    assert_rounded(found, reference.gated_norm(*arguments), norm_terms(width) + SIGMOID)
    for row in range(rows):
        assert torch.equal(found[row], triton.gated_norm(x[row:][:1], gate[row:][:1], *arguments[2:])[0])


def test_groups_may_share_their_weight() -> None:
    x, gate = torch.randn(2, 5, 3 * 40, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(40, generator=torch.Generator().manual_seed(1))
    found = triton.gated_norm(x, gate, weight, 1e-3, 3, True)
    assert_rounded(found, reference.gated_norm(x, gate, weight.repeat(3), 1e-3, 3, True), norm_terms(40) + SIGMOID)


def test_the_gate_may_be_a_sigmoid() -> None:
    x, gate = torch.randn(2, 5, 3 * 40, generator=torch.Generator().manual_seed(0))
    arguments = (x, gate, torch.rand(120, generator=torch.Generator().manual_seed(1)), 1e-3, 3, True, "sigmoid")
    assert_rounded(triton.gated_norm(*arguments), reference.gated_norm(*arguments), norm_terms(40) + SIGMOID)


def test_the_dtype_of_the_result() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    assert triton.gated_norm(x, x, weight.bfloat16(), 1e-5).dtype == torch.bfloat16
    assert triton.gated_norm(x, x, weight, 1e-5, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [8, 300, 1024, 8192])
def test_every_configuration_computes_the_same(width: int) -> None:
    x, gate, weight = torch.randn(3, 3, width, generator=torch.Generator().manual_seed(0))
    exact = reference.gated_norm(x, gate, weight[0], 1e-5)
    for config in triton.candidates(width):
        with chosen(lambda *_, config=config: config):
            assert_rounded(triton.gated_norm(x, gate, weight[0], 1e-5), exact, norm_terms(width) + SIGMOID)
