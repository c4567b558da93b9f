import pytest
import torch
from torch.nn import functional as F

from baton.kernels.norm.gated import gated_norm
from tests.kernels.rounding import SIGMOID, assert_rounded, norm_terms


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_norm_of_each_group_and_order_of_the_gate(groups: int, norm_before_gate: bool) -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(4, 12), torch.randn(4, 12), torch.randn(12)
    expected = torch.empty(4, 12)
    for token in range(4):
        for part in torch.arange(12).chunk(groups):
            values = x[token, part] if norm_before_gate else x[token, part] * F.silu(gate[token, part])
            normed = values / (values.square().mean() + 1e-3).sqrt() * weight[part]
            expected[token, part] = normed * F.silu(gate[token, part]) if norm_before_gate else normed
    actual = gated_norm(x, gate, weight, 1e-3, groups, norm_before_gate)
    assert_rounded(actual, expected, norm_terms(12 // groups) + SIGMOID)


@pytest.mark.parametrize("tokens", [4, 200])
def test_the_gate_may_be_a_sigmoid(tokens: int) -> None:
    x, gate = torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(12, generator=torch.Generator().manual_seed(1))
    normed = F.rms_norm(x, (12,), weight, 1e-3)
    found = gated_norm(x, gate, weight, 1e-3, 1, True, "sigmoid")
    assert_rounded(found, normed * gate.sigmoid(), norm_terms(12) + SIGMOID)
    assert_rounded(gated_norm(x, gate, None, 1e-3, 1, False, "sigmoid"), x * gate.sigmoid(), SIGMOID + 1)


@pytest.mark.parametrize("tokens", [4, 200])
def test_without_a_weight_there_is_only_the_gate(tokens: int) -> None:
    x, gate = torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(0))
    assert_rounded(gated_norm(x, gate, None, 1e-3, 3), x * F.silu(gate), SIGMOID + 1)
    assert gated_norm(x.bfloat16(), gate, None, 1e-3).dtype == torch.bfloat16


def test_result_has_the_dtype_of_the_weight() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    exact = gated_norm(x, x, torch.ones(8), 1e-5)
    rounded = gated_norm(x, x, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(rounded, exact.bfloat16())
