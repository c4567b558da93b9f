import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.quantized import reference as integers
from baton.kernels.moe.experts import PARTS, Activation, PackedExperts, cpu, experts, native, pack, reference
from baton.kernels.runtime import cpp
from baton.models.layers.experts import Experts
from tests.kernels.installed import as_multiplied, installed, library_for
from tests.kernels.rounding import SIGMOID, assert_within, gamma, unit

F32, BF16 = torch.float32, torch.bfloat16
BOTH: tuple[Activation, ...] = ("silu_gated", "relu2")
ACTIVATIONS, DTYPES = st.sampled_from(BOTH), st.sampled_from([F32, BF16])
few = settings(max_examples=30, deadline=None)


def drawn(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return random arguments of `experts`. sizes: count, top_k, hidden, intermediate."""
    count, top_k, hidden, inner = sizes
    g = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(rows, hidden, generator=g).to(dtype), torch.rand(rows, top_k, generator=g)
    chosen = torch.rand(rows, count, generator=g).argsort(dim=1)[:, :top_k].int().contiguous()
    first = torch.randn(count, PARTS[activation] * inner, hidden, generator=g) * hidden**-0.5
    second = torch.randn(count, hidden, inner, generator=g) * inner**-0.5
    return x, chosen, weights, first.to(dtype), second.to(dtype)


@dataclass(frozen=True)
class ExpertSums:
    """The result of `experts` in float64, and bounds of errors."""

    y: Tensor
    error: Tensor  # of float32 sums
    rounding: Tensor  # sum of the magnitudes of the terms that have an activation as factor, which is rounded


def exactly(
    x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor, activation: Activation
) -> ExpertSums:
    """Compute `experts` in float64, one token and expert at a time."""
    y, error, rounding = torch.zeros(3, *x.shape, dtype=torch.float64)
    (inner, inputs), top_k = (second.shape[2], x.shape[1]), chosen.shape[1]
    for row, places in enumerate(chosen.tolist()):
        for place, expert in enumerate(places):
            if expert < 0:
                continue
            up, size = first[expert].double() @ x[row].double(), first[expert].double().abs() @ x[row].double().abs()
            if activation == "relu2":
                hidden, size = up.relu() ** 2, 2 * up.relu() * size
            else:
                (gate, up), (gate_size, size) = up.chunk(2), size.chunk(2)
                hidden, size = F.silu(gate) * up, 1.1 * gate_size * up.abs() + F.silu(gate).abs() * size
            by = weights[row, place] * second[expert].double()
            y[row] += by @ hidden
            error[row] += by.abs() @ (gamma(inputs) * size + gamma(SIGMOID + 1 + inner + top_k) * hidden.abs())
            rounding[row] += by.abs() @ hidden.abs()
    return ExpertSums(y, error, rounding)


def assert_near(found: Tensor, exact: ExpertSums) -> None:
    assert_within(found, exact.y, exact.error + unit(found.dtype) * (exact.rounding + exact.y.abs()))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    count = draw(st.integers(1, 12))
    return count, draw(st.integers(1, min(count, 5))), draw(st.integers(1, 70)), draw(st.integers(1, 70))


@few
@given(seed=st.integers(0, 99), rows=st.integers(0, 20), sizes=shapes(), activation=ACTIVATIONS)
def test_each_token_gets_its_experts(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation
) -> None:
    arguments = drawn(seed, rows, sizes, activation, F32)
    exact = exactly(*arguments, activation)
    assert_near(reference.experts(*arguments, activation), exact)
    assert_near(cpu.experts(*arguments, activation), exact)


def run(
    x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor, activation: Activation,
    bits: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `experts` with native code."""
    stacks = pack(first, PARTS[activation], bits), pack(second, 1, bits)
    assert isinstance(stacks[0], PackedExperts) and isinstance(stacks[1], PackedExperts)
    assert native.takes(x, *stacks)
    return experts(x, chosen, weights, *stacks, activation)


@pytest.mark.usefixtures("target")
@few
@given(seed=st.integers(0, 99), rows=st.integers(0, 20), sizes=shapes(), activation=ACTIVATIONS, dtype=DTYPES)
def test_native_code_gives_each_token_its_experts(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation, dtype: torch.dtype
) -> None:
    arguments = drawn(seed, rows, sizes, activation, dtype)
    assert_near(run(*arguments, activation), exactly(*arguments, activation))


def rounded(weight: Tensor, parts: int, bits: int) -> Tensor:
    """Return the weight after quantization and dequantization."""
    flat = weight.unflatten(1, (parts, -1)).flatten(0, 1)
    matrices = [integers.dequantize(*integers.quantize(matrix, bits))[:, : weight.shape[2]] for matrix in flat]
    return torch.stack(matrices).view(weight.shape)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_may_be_integers(activation: Activation, dtype: torch.dtype, bits: int) -> None:
    x, chosen, weights, first, second = drawn(0, 40, (5, 2, 100, 70), activation, dtype)
    stood_for = [
        as_multiplied(rounded(weight, parts, bits), bits, dtype)
        for weight, parts in ((first, PARTS[activation]), (second, 1))
    ]
    exact = exactly(x, chosen, weights, *stood_for, activation)
    assert_near(run(x, chosen, weights, first, second, activation, bits), exact)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("by", [reference.experts, cpu.experts, run])
def test_padding_gets_nothing(by: Callable[..., Tensor]) -> None:
    x, chosen, *rest = drawn(0, 5, (4, 2, 8, 8), "silu_gated", F32)
    chosen[3] = -1
    chosen[4, 0] = -1
    x[3] = torch.nan
    y = by(x, chosen, *rest, "silu_gated")
    assert (y[3] == 0).all() and (y[4] != 0).any()
    x[3] = 0
    assert_near(y, exactly(x, chosen, *rest, "silu_gated"))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("count", [1, 3])
def test_one_expert_may_have_every_token_and_others_none(count: int, dtype: torch.dtype) -> None:
    """One expert gets all tokens, which are more than a tile holds, and the other experts get none."""
    x, chosen, *rest = drawn(0, 230, (count, 1, 40, 50), "relu2", dtype)
    chosen[:] = count - 1
    assert_near(run(x, chosen, *rest, "relu2"), exactly(x, chosen, *rest, "relu2"))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_results_are_batch_invariant_and_independent_of_strides(
    activation: Activation, dtype: torch.dtype, bits: int | None
) -> None:
    x, chosen, weights, *stacks = drawn(0, 130, (6, 3, 70, 75), activation, dtype)
    chosen[:100, 0] = 5
    together = run(x, chosen, weights, *stacks, activation, bits)
    for row in range(0, 130, 7):
        alone = run(x[row, None], chosen[row, None], weights[row, None], *stacks, activation, bits)
        assert torch.equal(alone[0], together[row])
    wide = torch.full((130, 75), torch.nan, dtype=dtype)
    wide[:, :70] = x
    assert torch.equal(run(wide[:, :70], chosen, weights, *stacks, activation, bits), together)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_threads_change_no_bit(dtype: torch.dtype, rows: int) -> None:
    arguments = drawn(0, rows, (16, 4, 300, 200), "silu_gated", dtype)
    serial = run(*arguments, "silu_gated")
    for threads in (2, 3):
        cpp.use_threads(threads)
        assert torch.equal(run(*arguments, "silu_gated"), serial)


@pytest.mark.usefixtures("target")
def test_arguments_that_do_not_fit_are_refused() -> None:
    x, chosen, weights, first, second = drawn(0, 3, (4, 2, 8, 40), "silu_gated", F32)
    with pytest.raises(ValueError, match=r"x is \(3, 7\)"):
        run(x[:, :7], chosen, weights, first, second, "silu_gated")
    with pytest.raises(ValueError, match=r"x is \(3, 8\) for 4 experts of 1 x 80 x 8"):
        run(x, chosen, weights, first, second, "relu2")
    with pytest.raises(ValueError, match=r"x is of torch\.bfloat16"):
        run(x.bfloat16(), chosen, weights, first, second, "silu_gated")
    with pytest.raises(ValueError, match=r"experts are \(3, 2\) of torch\.int64"):
        run(x, chosen.long(), weights, first, second, "silu_gated")


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_layer_keeps_one_copy_of_its_weights(bits: int | None) -> None:
    x, chosen, weights, first, second = drawn(0, 5, (4, 2, 64, 96), "silu_gated", F32)
    layer = Experts(64, 96, 4, "silu_gated", F32)
    layer.input_linear.data.copy_(first)
    layer.output_linear.data.copy_(second)
    layer.pack(bits)
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    assert addresses == {name: packed.data.data_ptr() for name, packed in layer.packed.items()}
    assert sum(packed.numel for packed in layer.packed.values()) == first.numel() + second.numel()
    stood_for = (first, second) if bits is None else (rounded(first, 2, bits), rounded(second, 1, bits))
    assert_near(layer(x, chosen, weights), exactly(x, chosen, weights, *stood_for, "silu_gated"))


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_of_small_experts_use_all_threads(rows: int) -> None:
    """All threads share the work: each block of outputs loops over all experts, so even few blocks take long.

    Once, a single thread computed all blocks.
    """
    x, chosen, weights, first, second = drawn(0, rows, (16, 4, 768, 128), "silu_gated", BF16)
    with installed(threads=2):
        loops = ctypes.CDLL(str(library_for())).baton_shared_loops
        before = loops()
        y = run(x, chosen, weights, first, second, "silu_gated")
        assert loops() - before == 2
    assert_near(y, exactly(x, chosen, weights, first, second, "silu_gated"))
