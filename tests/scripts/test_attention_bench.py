"""scripts/bench attention: both sides compute the same."""

import pytest
import torch

from scripts.benchmarks.parts import attention
from tests.kernels.installed import installed


@pytest.mark.parametrize("shape", attention.SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 64])
def test_both_sides_compute_the_attention_of_each_rows_last_token(shape: attention.Shape, tokens: int) -> None:
    torch.manual_seed(0)
    layer = attention.layer_of(shape, 3, tokens)
    query = torch.randn(3, shape.heads, shape.width).bfloat16()
    with installed():
        found = layer.paged(query).float()
    expected = attention.by_torch(query, *layer.contiguous()).float()
    # Both round the softmax weights and the result to bfloat16.
    assert (found - expected).norm() <= 2**-6 * expected.norm()
