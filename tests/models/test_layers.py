import pytest
import torch

from baton.kernels.drafts import Drafts
from baton.kernels.linear.dense import cpu
from baton.kernels.linear.quantized import QuantizedWeight
from baton.kernels.moe.experts import experts, pack
from baton.models.batch import Batch, Decode
from baton.models.layers.linear import Embedding, HeadLinear, Linear
from baton.models.layers.step import _plan_pages, _plan_rows
from baton.models.loading.checkpoint import random_model
from tests.kernels.linear.test_quantized import assert_projects
from tests.kernels.moe.test_experts import assert_near, drawn, exactly, rounded
from tests.kernels.rounding import assert_rounded
from tests.models.oracle import settings_of
from tests.models.test_parity import ids, make_pools, pages, prefill

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
    plain, added = layer.weight.detach(), torch.zeros(33) if layer.bias is None else layer.bias.detach()
    numbers = added.double(), x.double(), plain.double().t()
    layer.pack()
    assert layer.weight.is_mkldnn
    assert layer.packed is not None
    assert torch.equal(layer.packed.plain(), plain)
    assert_rounded(layer(x), torch.addmm(*numbers), 49, torch.addmm(*map(torch.abs, numbers)))


@pytest.mark.usefixtures("packable")
@pytest.mark.parametrize("tied", [False, True])
def test_only_a_tied_embedding_keeps_a_packed_head(tied: bool) -> None:
    torch.manual_seed(0)
    table = Embedding(20, 32, tied, BF16)
    table.weight.data.normal_()
    table.pack()
    assert (table.packed is not None) == tied
    hidden = table(torch.tensor([3, 7]))
    numbers = hidden.detach().double(), table.weight.detach().double().t()
    assert_rounded(table.logits(hidden), torch.mm(*numbers), 32, torch.mm(*map(torch.abs, numbers)))
    assert torch.equal(hidden, table.weight[[3, 7]])


def test_float32_weights_stay_plain() -> None:
    layer = Linear(8, 8, False, torch.float32)
    layer.pack()
    assert layer.packed is None


@pytest.mark.parametrize("bits", [8, 4])
def test_torch_computes_with_integers_where_there_is_no_native_code(bits: int) -> None:
    torch.manual_seed(0)
    layer, table, x = Linear(96, 33, True, BF16), Embedding(33, 96, True, BF16), torch.randn(5, 96).to(BF16)
    for parameter in (*layer.parameters(), *table.parameters()):
        parameter.data.normal_()
    weights = layer.weight.detach(), table.weight.detach()
    for module in (layer, table):
        module.pack(bits)
        assert isinstance(module.packed, QuantizedWeight) and module.packed.layout == "torch"
        assert module.weight.dtype == torch.uint8
    assert_projects(layer(x), x, weights[0], bits, layer.bias)
    assert_projects(table.logits(x), x, weights[1], bits, None)
    assert table(torch.tensor([3, 7])).dtype == BF16


@pytest.mark.parametrize("bits", [8, 4])
def test_torch_computes_with_experts_of_integers_where_there_is_no_native_code(bits: int) -> None:
    x, chosen, weights, first, second = drawn(0, 9, (5, 2, 100, 70), "silu_gated", torch.float32)
    stacks = pack(first, 2, bits), pack(second, 1, bits)
    assert stacks[0] is not None and stacks[1] is not None and stacks[0].layout == "torch"
    exact = exactly(x, chosen, weights, rounded(first, 2, bits), rounded(second, 1, bits), "silu_gated")
    assert_near(experts(x, chosen, weights, *stacks, "silu_gated"), exact)


def test_latent_attention_sums_only_the_latents() -> None:
    """The values are the latents of 13 numbers, without the 2 numbers of shared keys that follow each latent."""
    model, widths = random_model(settings_of("kimi_linear-odd"), torch.float32, torch.device("cpu"), 0), set[int]()
    assert isinstance(model, torch.nn.Module)
    for layer in model.modules():
        if isinstance(layer, HeadLinear) and layer.weight.shape[2] == 13:
            layer.register_forward_pre_hook(lambda _, inputs: widths.add(inputs[0].shape[2]))
    model.forward(prefill(ids(9), 0, 0, pages(1)), make_pools(model, 1, 1))
    assert widths == {13}


@pytest.mark.parametrize("drafts", [None, Drafts.of([0, 2, 0], [1, 3, 2], [0, 1, 2])])
def test_the_page_plan_of_rows_alone_equals_the_general_one(drafts: Drafts | None) -> None:
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    rows = Decode(torch.arange(3), torch.tensor([0, 8, 29]), table, drafts=drafts)
    tokens = [(0, 0), (1, 8), (2, 29)] if drafts is None else [(0, 0), (1, 8), (1, 9), (1, 10), (2, 29), (2, 30)]
    positions = torch.tensor([position for _, position in tokens])
    alone = _plan_rows(rows, positions, 8)
    general = _plan_pages(Batch(torch.zeros(len(tokens)), positions, None, rows), 8)
    for name in ("offsets", "starts", "table", "places"):
        assert torch.equal(getattr(alone, name), getattr(general, name)), name
    assert alone.places.tolist() == [8 * int(table[row, at // 8]) + at % 8 for row, at in tokens]
    assert torch.equal(alone.table, table[[row for row, _ in tokens]]) and torch.equal(alone.starts, positions)
    assert alone.offsets.tolist() == list(range(len(tokens) + 1))
    assert (alone.prompts, alone.longest) == (general.prompts, general.longest)
