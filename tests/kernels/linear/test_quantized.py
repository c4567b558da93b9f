from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from baton.kernels.linear.quantized import QuantizedWeight, cpu, linear, look_up, native, quantize, reference
from baton.kernels.linear.quantized.forms import INTEGERS
from baton.kernels.runtime import cpp
from baton.models.layers.linear import Embedding, Linear
from tests.kernels.installed import as_multiplied, installed
from tests.kernels.rounding import assert_rounded

F32, BF16 = torch.float32, torch.bfloat16
DTYPES, BITS = st.sampled_from([F32, BF16]), st.sampled_from([8, 4])
SIZES = st.integers(1, 100)
many = settings(max_examples=40, deadline=None)


def drawn(seed: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)]
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight, bias


def by_torch(weight: Tensor, bits: int) -> QuantizedWeight:
    data = cpu.packed(*reference.quantize(weight, bits), bits)
    return QuantizedWeight(data, INTEGERS[bits], *weight.shape, weight.dtype, "torch")


def run(x: Tensor, weight: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    quantized = quantize(weight, bits)
    assert quantized.layout == "native"
    return linear(x, quantized, bias)


def assert_projects(y: Tensor, x: Tensor, weight: Tensor, bits: int, bias: Tensor | None) -> None:
    """Check y against the exact product, a sum of one term for each input, its scale and the bias."""
    numbers = reference.dequantize(*reference.quantize(weight, bits))[:, : x.shape[1]]
    assert_near(y, x, as_multiplied(numbers, bits, x.dtype).double(), bias)


def assert_near(y: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None) -> None:
    """Check y against the exact product with these weights, float64."""
    exact, size = x.double() @ numbers.t(), x.double().abs() @ numbers.t().abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.dtype == x.dtype
    assert_rounded(y, exact, x.shape[1] + 2, size)


@many
@given(seed=SIZES, inputs=st.integers(1, 300), outputs=st.integers(1, 40), bits=BITS, dtype=DTYPES)
def test_no_weight_is_further_off_than_half_a_step(
    seed: int, inputs: int, outputs: int, bits: int, dtype: torch.dtype
) -> None:
    _, weight, _ = drawn(seed, 1, inputs, outputs, dtype)
    codes, scales = reference.quantize(weight, bits)
    groups = -(-inputs // reference.GROUP)
    assert (codes.shape, codes.dtype) == ((outputs, groups * reference.GROUP), torch.int8)
    assert (scales.shape, scales.dtype) == ((outputs, groups), BF16)
    levels = 2 ** (bits - 1)
    assert (codes[:, inputs:] == 0).all()
    assert int(codes.min()) >= -levels and int(codes.max()) < levels
    numbers = reference.dequantize(codes, scales)[:, :inputs]
    step = scales.float().abs().repeat_interleave(reference.GROUP, 1)[:, :inputs]
    cut_off = weight.float().abs() - (levels - 1) * step
    assert ((numbers - weight.float()).abs() <= 1.0001 * torch.maximum(step / 2, cut_off)).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.0062), (4, 0.095)])
def test_errors_are_as_small_as_bits_allow(bits: int, most: float) -> None:
    """`most` bounds the root mean square error for normally distributed weights.

    With 4 bits, clipping the largest weights reduces this error by 5 %.
    """
    _, weight, _ = drawn(0, 1, 640, 200, F32)
    assert (reference.dequantize(*reference.quantize(weight, bits)) - weight).square().mean().sqrt() < most


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e30])
def test_weights_of_any_size(bits: int, size: float) -> None:
    _, weight, _ = drawn(0, 1, 70, 3, F32)
    codes, scales = reference.quantize(weight * size, bits)
    assert scales.isfinite().all()
    error = reference.dequantize(codes, scales)[:, :70] - weight * size
    assert error.abs().max() <= max(size, 1e-37) * (0.05 if bits == 8 else 0.6)


@pytest.mark.usefixtures("target")
@many
@given(
    seed=SIZES, rows=st.integers(1, 40), inputs=st.integers(1, 300), outputs=SIZES,
    bits=BITS, dtype=DTYPES, bias=st.booleans(),
)  # fmt: skip
def test_projection_equals_the_exact_one_to_its_rounding(
    seed: int, rows: int, inputs: int, outputs: int, bits: int, dtype: torch.dtype, bias: bool
) -> None:
    x, weight, drawn_bias = drawn(seed, rows, inputs, outputs, dtype)
    added = drawn_bias if bias else None
    assert_projects(run(x, weight, bits, added), x, weight, bits, added)


@many
@given(
    seed=SIZES, rows=st.integers(1, 40), inputs=st.integers(1, 300), outputs=st.integers(1, 2100),
    bits=BITS, dtype=DTYPES, bias=st.booleans(),
)  # fmt: skip
def test_torch_computes_the_same(
    seed: int, rows: int, inputs: int, outputs: int, bits: int, dtype: torch.dtype, bias: bool
) -> None:
    x, weight, drawn_bias = drawn(seed, rows, inputs, outputs, dtype)
    added = drawn_bias if bias else None
    numbers = reference.dequantize(*reference.quantize(weight, bits))[:, :inputs].double()
    assert_near(linear(x, by_torch(weight, bits), added), x, numbers, added)


@pytest.mark.usefixtures("target")
@many
@given(seed=SIZES, rows=st.integers(2, 40), inputs=st.integers(1, 300), outputs=SIZES, bits=BITS, dtype=DTYPES)
def test_results_are_batch_invariant_and_independent_of_strides(
    seed: int, rows: int, inputs: int, outputs: int, bits: int, dtype: torch.dtype
) -> None:
    x, weight, bias = drawn(seed, rows, inputs, outputs, dtype)
    together = run(x, weight, bits, bias)
    assert all(torch.equal(run(x[i : i + 1], weight, bits, bias)[0], together[i]) for i in range(rows))
    wide = torch.full((rows, inputs + 3), torch.nan, dtype=dtype)
    wide[:, :inputs] = x
    assert torch.equal(run(wide[:, :inputs], weight, bits, bias), together)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_a_long_prompt_gets_the_same_as_alone(bits: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(0, 530, 300, 70, dtype)
    together = run(x, weight, bits, bias)
    rows = (0, 95, 96, 191, 200, 264, 265, 511, 512, 529)
    assert all(torch.equal(run(x[i : i + 1], weight, bits, bias)[0], together[i]) for i in rows)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("rows", [1, 20, 70, 300])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_with_one_input_is_its_weight(bits: int, dtype: torch.dtype, rows: int) -> None:
    _, weight, _ = drawn(0, 1, 300, 40, dtype)
    numbers = reference.dequantize(*reference.quantize(weight, bits))[:, :300]
    found = torch.cat([run(x, weight, bits) for x in torch.eye(300, dtype=dtype).split(rows)])
    assert torch.equal(found.t(), as_multiplied(numbers, bits, dtype).to(dtype))


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 5, 50])
def test_threads_change_no_bit(bits: int, dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = drawn(0, rows, 900, 1000, dtype)
    serial = run(x, weight, bits, bias)
    for threads in (2, 3):
        cpp.use_threads(threads)
        assert torch.equal(run(x, weight, bits, bias), serial)


def assert_looks_up(quantized: QuantizedWeight, weight: Tensor, bits: int) -> None:
    vocab, hidden = weight.shape
    tokens = torch.randint(vocab, (40,))
    expected = reference.look_up(tokens, *reference.quantize(weight, bits), hidden, weight.dtype)
    found = look_up(tokens, quantized)
    assert found.dtype == weight.dtype
    assert torch.equal(found, expected)
    for outside in (-1, vocab):
        with pytest.raises(IndexError):
            look_up(torch.tensor([0, outside]), quantized)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 1), (33, 7), (64, 48), (40, 130)])
def test_rows_are_looked_up_out_of_the_packed_weight(bits: int, dtype: torch.dtype, vocab: int, hidden: int) -> None:
    _, weight, _ = drawn(0, 1, hidden, vocab, dtype)
    quantized = quantize(weight, bits)
    assert quantized.layout == "native"
    assert_looks_up(quantized, weight, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_torch_looks_rows_up(bits: int) -> None:
    _, weight, _ = drawn(0, 1, 70, 33, BF16)
    assert_looks_up(by_torch(weight, bits), weight, bits)


@pytest.mark.usefixtures("native_kernels")
def test_a_weight_is_quantized_in_parts() -> None:
    _, weight, _ = drawn(0, 1, 65, 2500, BF16)
    for bits in (8, 4):
        codes, scales = reference.quantize(weight, bits)
        assert torch.equal(quantize(weight, bits).data, native.packed(reference.grouped(codes, scales, bits)))
        assert quantize(weight, bits).data.nbytes == 79 * 32 * 2 * (2 + 64 * bits // 8)


def test_torch_keeps_no_more_than_the_integers_and_their_scales() -> None:
    _, weight, _ = drawn(0, 1, 128, 10, F32)
    for bits in (8, 4):
        assert cpu.packed(*reference.quantize(weight, bits), bits).nbytes == 10 * 2 * (2 + 64 * bits // 8)


@pytest.mark.usefixtures("native_kernels")
def test_other_layouts_are_refused() -> None:
    x, weight, bias = drawn(0, 3, 70, 40, F32)
    data = native.packed(reference.grouped(*reference.quantize(weight, 8), 8))
    with pytest.raises(ValueError, match=r"x is \(3, 64\)"):
        native.linear(x[:, :64], data, INTEGERS[8], 40, None)
    with pytest.raises(ValueError, match=r"of 4 bits in groups of 64"):
        native.linear(x, data, INTEGERS[4], 40, None)
    with pytest.raises(ValueError, match=r"x is .* of torch\.float64"):
        native.linear(x.double(), data, INTEGERS[8], 40, None)
    with pytest.raises(ValueError, match="bias is"):
        native.linear(x, data, INTEGERS[8], 40, bias[:5])


def assert_writes_columns(
    project: Callable[[Tensor | None], Tensor],
    rows: int,
    outputs: int,
    dtype: torch.dtype,
    equal: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> None:
    """Check that a projection writes only its own columns of a wider tensor, with the bits of a new tensor.

    project: takes `out` and returns the result. equal: compares results; torch may add up in another order with `out`.
    """
    wide = torch.full((rows, outputs + 48), 7, dtype=dtype)
    assert equal(project(wide[:, 16 : 16 + outputs]), project(None))
    assert equal(wide[:, 16 : 16 + outputs], project(None))
    assert (wide[:, :16] == 7).all() and (wide[:, 16 + outputs :] == 7).all()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_results_are_written_to_columns_of_a_wider_tensor(rows: int, dtype: torch.dtype, bits: int) -> None:
    x, weight, bias = drawn(0, rows, 130, 45, dtype)
    for added in (bias, None):
        for integers in (by_torch(weight, bits), quantize(weight, bits)):
            assert_writes_columns(partial(linear, x, integers, added), rows, 45, dtype)
    with pytest.raises(ValueError, match="out is"):
        linear(x, quantize(weight, bits), None, x)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("bits", [8, 4])
def test_layers_keep_only_the_integers(bits: int) -> None:
    x, weight, _ = drawn(0, 5, 64, 96, BF16)
    layer, table, untied = Linear(64, 96, False, BF16), Embedding(96, 64, True, BF16), Embedding(96, 64, False, BF16)
    for module in (layer, table, untied):
        module.weight.data.copy_(weight)
        module.pack(bits)
    integers = quantize(weight, bits)
    for packed in (layer.packed, table.packed):
        assert isinstance(packed, QuantizedWeight)
        assert torch.equal(packed.data, integers.data)
    assert layer.weight.nbytes == table.weight.nbytes == integers.data.nbytes
    assert untied.packed is None
    tokens = torch.tensor([95, 0, 7])
    assert torch.equal(untied(tokens), weight[tokens])
    assert torch.equal(table(tokens), look_up(tokens, integers))
    assert torch.equal(layer(x), table.logits(x))
    assert torch.equal(layer(x), linear(x, integers, None))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("is_native", [True, False])
def test_the_last_outputs_of_a_layer_stay_floats(is_native: bool, dtype: torch.dtype, bits: int) -> None:
    x, weight, bias = drawn(0, 5, 64, 96, dtype)
    layer = Linear(64, 96, True, dtype, 40)
    layer.weight.data.copy_(weight)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    with installed() if is_native else nullcontext():
        layer.pack(bits)
        y = layer(x)
        assert_projects(y[:, :56], x, weight[:56], bits, bias[:56])
    floats = bias[56:].double(), x.double(), weight[56:].t().double()
    assert_rounded(y[:, 56:], torch.addmm(*floats), 65, torch.addmm(*map(torch.abs, floats)))
    assert layer.float_weight is not None and layer.weight.dtype == torch.uint8
