import pytest
import torch

from kernels.linear import cpu
from models.layers.linear import Embedding, Linear

BF16 = torch.bfloat16


@pytest.fixture
def packable() -> None:
    if not cpu.takes(torch.empty(1, dtype=BF16)):
        pytest.skip("this processor has no packed bfloat16 weights")


@pytest.mark.usefixtures("packable")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_packed_projection_equals_the_plain_one(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    layer, x = Linear(48, 33, bias, BF16), torch.randn(rows, 48).to(BF16)
    for parameter in layer.parameters():
        parameter.data.normal_()
    exact = x.float() @ layer.weight.detach().float().t() + (
        layer.bias.detach().float() if layer.bias is not None else 0
    )
    plain = layer.weight.detach()
    layer.pack()
    assert layer.weight.is_mkldnn
    assert layer.packed is not None
    assert torch.equal(layer.packed.plain(), plain)
    torch.testing.assert_close(layer(x).float(), exact, atol=0.05, rtol=0.01)


@pytest.mark.usefixtures("packable")
@pytest.mark.parametrize("tied", [False, True])
def test_only_a_tied_embedding_keeps_a_packed_head(tied: bool) -> None:
    torch.manual_seed(0)
    table = Embedding(20, 32, tied, BF16)
    table.weight.data.normal_()
    table.pack()
    assert (table.packed is not None) == tied
    hidden = table(torch.tensor([3, 7]))
    torch.testing.assert_close(table.logits(hidden), (hidden @ table.weight.t()).detach(), atol=0.05, rtol=0.01)
    assert torch.equal(hidden, table.weight[[3, 7]])


def test_float32_weights_stay_plain() -> None:
    layer = Linear(8, 8, False, torch.float32)
    layer.pack()
    assert layer.packed is None
