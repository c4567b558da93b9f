from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.linear.dense import PackedWeight, cpu, linear, look_up, native, pack
from baton.kernels.runtime import cpp
from baton.models.layers.linear import Embedding, Linear
from tests.kernels.linear.test_quantized import assert_writes_columns
from tests.kernels.rounding import assert_rounded

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
SIZES = st.integers(1, 100)
many = settings(max_examples=40, deadline=None)


def drawn(seed: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)]
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight, bias


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    packed = pack(weight)
    assert packed is not None
    assert packed.with_rows
    return linear(x, packed, bias)


@pytest.mark.usefixtures("target")
@many
@given(seed=SIZES, rows=st.integers(1, 40), inputs=st.integers(1, 700), outputs=SIZES, dtype=DTYPES, bias=st.booleans())
def test_projection_equals_the_exact_one_to_its_rounding(
    seed: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    x, weight, added = drawn(seed, rows, inputs, outputs, dtype)
    exact = x.double() @ weight.double().t() + (added.double() if bias else 0)
    size = x.double().abs() @ weight.double().abs().t() + added.double().abs()
    assert_rounded(run(x, weight, added if bias else None), exact, inputs + 1, size)


@pytest.mark.usefixtures("target")
@many
@given(seed=SIZES, rows=st.integers(2, 40), inputs=st.integers(1, 700), outputs=SIZES, dtype=DTYPES)
def test_results_are_batch_invariant_and_independent_of_strides(
    seed: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, weight, bias = drawn(seed, rows, inputs, outputs, dtype)
    together = run(x, weight, bias)
    assert all(torch.equal(run(x[i : i + 1], weight, bias)[0], together[i]) for i in range(rows))
    wide = torch.full((rows, inputs + 3), torch.nan, dtype=dtype)
    wide[:, :inputs] = x
    assert torch.equal(run(wide[:, :inputs], weight, bias), together)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(97, 1100, 300), (130, 2049, 70), (530, 64, 33)])
def test_many_rows_with_many_inputs(rows: int, inputs: int, outputs: int) -> None:
    """Products of more rows and inputs than are multiplied at once."""
    x, weight, bias = drawn(1, rows, inputs, outputs, BF16)
    exact = x.double() @ weight.double().t() + bias.double()
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    together = run(x, weight, bias)
    assert_rounded(together, exact, inputs + 1, size)
    for some in (slice(0, 1), slice(rows - 17, rows), slice(40, 96), slice(1, rows)):
        assert torch.equal(run(x[some], weight, bias), together[some])


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sum_that_underflows_has_the_same_sign_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(97, 64, dtype=dtype), torch.ones(40, 64, dtype=dtype)
    x[:, 0], x[:, 32] = 2e-38, -2.5e-38
    packed = native.packed(weight)
    torch.set_flush_denormal(True)
    try:
        together, alone = (native.linear(rows, packed, 40, None) for rows in (x, x[:1]))
    finally:
        torch.set_flush_denormal(False)
    assert (together == 0).all()
    assert torch.equal(together[:1].signbit(), alone.signbit())


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 50, 300])
def test_threads_change_no_bit(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = drawn(0, rows, 900, 1000, dtype)
    serial = run(x, weight, bias)
    for threads in (2, 3):
        cpp.use_threads(threads)
        assert torch.equal(run(x, weight, bias), serial)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 1), (33, 7), (64, 48)])
def test_rows_are_looked_up_out_of_the_packed_weight(dtype: torch.dtype, vocab: int, hidden: int) -> None:
    _, weight, _ = drawn(0, 1, hidden, vocab, dtype)
    packed = pack(weight)
    assert packed is not None
    tokens = torch.randint(vocab, (40,))
    assert torch.equal(look_up(tokens, packed), weight[tokens])
    assert torch.equal(packed.plain(), weight)
    for outside in (-1, vocab):
        with pytest.raises(IndexError, match=f"not in a table of {vocab}"):
            look_up(torch.tensor([0, outside]), packed)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 70, 130])
def test_results_are_written_to_columns_of_a_wider_tensor(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(0, rows, 71, 45, dtype)
    layouts = [weight, pack(weight), *([PackedWeight(cpu.packed(weight), 45, 71, False)] if cpu.takes(weight) else [])]
    for each in layouts:
        assert each is not None
        is_native = isinstance(each, PackedWeight) and each.with_rows
        equal = torch.equal if is_native else partial(torch.allclose, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        for added in (bias, None):
            assert_writes_columns(partial(linear, x, each, added), rows, 45, dtype, equal)
    with pytest.raises(ValueError, match="out is"):
        linear(x, pack(weight) or weight, None, x)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    x, weight, bias = drawn(0, 3, 8, 40, F32)
    packed = native.packed(weight)
    with pytest.raises(ValueError, match=r"x is \(3, 7\)"):
        native.linear(x[:, :7], packed, 40, None)
    with pytest.raises(ValueError, match=r"x is .* of torch\.bfloat16"):
        native.linear(x.bfloat16(), packed, 40, None)
    with pytest.raises(ValueError, match="bias is"):
        native.linear(x, packed, 40, bias[:5])


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_layers_keep_one_copy_of_their_weights(dtype: torch.dtype) -> None:
    x, weight, _ = drawn(0, 5, 64, 96, dtype)
    layer, table = Linear(64, 96, False, dtype), Embedding(96, 64, True, dtype)
    plain = Embedding(96, 64, False, dtype)
    for module in (layer, table, plain):
        module.weight.data.copy_(weight)
        module.pack()
        assert module.weight.nbytes <= weight.nbytes
    assert layer.packed is not None
    assert table.packed is not None
    assert layer.weight.data_ptr() == layer.packed.data.data_ptr()
    assert table.weight.data_ptr() == table.packed.data.data_ptr()
    assert plain.packed is None
    tokens = torch.tensor([95, 0, 7])
    assert torch.equal(table(tokens), weight[tokens])
    assert torch.equal(plain(tokens), weight[tokens])
    assert torch.equal(layer(x), table.logits(x))
