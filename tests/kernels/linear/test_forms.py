"""Weights in the forms of files: products, rows and experts, on each target of this CPU."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.linear import quantized
from baton.kernels.linear.quantized import Form, Groups, QuantizedWeight, keep
from baton.kernels.linear.quantized.forms import INTEGERS
from baton.kernels.linear.quantized.native import packed, random_groups, shape_of
from baton.kernels.moe.experts import PackedExperts, native as experts_native, reference as experts_reference
from baton.kernels.moe.experts.packed import keep as keep_experts
from baton.kernels.runtime import cpp
from baton.models.gguf.blocks import BLOCKS
from tests.kernels.installed import as_multiplied, installed
from tests.kernels.rounding import assert_rounded

F32, BF16 = torch.float32, torch.bfloat16
FORMS = {name: block.form for name, block in BLOCKS.items()}
few = settings(max_examples=25, deadline=None)


def drawn(form: Form, seed: int, rows: int, outputs: int, spans: int, dtype: torch.dtype) -> tuple[Tensor, Groups]:
    """Return x [rows, inputs] and a weight [outputs, inputs]. spans: of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    groups = random_groups(form, outputs, spans * form.width, generator)
    return torch.randn(rows, spans * form.width, generator=generator).to(dtype), groups


def kept(groups: Groups, dtype: torch.dtype) -> QuantizedWeight:
    outputs, inputs = groups.codes.shape
    return keep(groups.split(64), groups.form, outputs, inputs, dtype)


def kept_experts(matrices: list[Groups], parts: int, dtype: torch.dtype) -> PackedExperts:
    outputs, inputs = matrices[0].codes.shape
    return keep_experts(enumerate(matrices), matrices[0].form, (len(matrices), outputs, inputs), parts, dtype)


def exact_product(x: Tensor, weights: Tensor, groups: Groups, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x @ weightsᵀ + bias, and the sum of its terms' magnitudes: float64 [rows, outputs].

    A weight's minimum counts as a separate term, because the weight may be much smaller than its two terms.
    """
    numbers = weights.double()
    ones = Groups(groups.form, torch.zeros_like(groups.codes), *groups.fields()[1:]).numbers().double()
    exact, size = x.double() @ numbers.t(), x.double().abs() @ ((numbers - ones).abs() + ones.abs()).t()
    return (exact, size) if bias is None else (exact + bias.double(), size + bias.double().abs())


def assert_projects(y: Tensor, x: Tensor, groups: Groups, bias: Tensor | None) -> None:
    """Check y against the exact product."""
    exact, size = exact_product(x, as_multiplied(groups.numbers(), groups.form.bits, x.dtype), groups, bias)
    assert y.dtype == x.dtype
    assert_rounded(y, exact, x.shape[1] + 4, size)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("name", FORMS)
@few
@given(
    seed=st.integers(0, 99), rows=st.integers(1, 20), outputs=st.integers(1, 70), spans=st.integers(1, 3),
    dtype=st.sampled_from([F32, BF16]), bias=st.booleans(),
)  # fmt: skip
def test_a_product_equals_the_exact_one_to_its_rounding(
    name: str, seed: int, rows: int, outputs: int, spans: int, dtype: torch.dtype, bias: bool
) -> None:
    x, groups = drawn(FORMS[name], seed, rows, outputs, spans, dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    assert_projects(quantized.linear(x, kept(groups, dtype), added), x, groups, added)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_gets_the_same_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    x, groups = drawn(FORMS[name], 0, 230, 70, 2, dtype)
    weight = kept(groups, dtype)
    for rows in (7, 40, 230):
        together = quantized.linear(x[:rows], weight, None)
        alone = {row: quantized.linear(x[row : row + 1], weight, None)[0] for row in {0, rows // 2, rows - 1}}
        assert all(torch.equal(one, together[row]) for row, one in alone.items())


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", FORMS)
def test_threads_change_no_bit(name: str) -> None:
    x, groups = drawn(FORMS[name], 0, 50, 1000, 3, BF16)
    found = []
    for threads in (1, 2, 3):
        cpp.use_threads(threads)
        found.append(quantized.linear(x, kept(groups, BF16), None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_looked_up(name: str, dtype: torch.dtype) -> None:
    _, groups = drawn(FORMS[name], 0, 1, 70, 2, dtype)
    tokens = torch.tensor([0, 69, 31, 32, 32])
    found, numbers = quantized.look_up(tokens, kept(groups, dtype)), groups.numbers()[tokens]
    # The subtraction of a minimum may be fused with the product before it.
    assert_rounded(found, numbers, 2, numbers.abs() + groups.numbers().abs().max())
    with pytest.raises(IndexError):
        quantized.look_up(torch.tensor([70]), kept(groups, dtype))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("size", [6e-8, 1e-6, 6.1e-5, 60_000.0])
def test_scales_may_be_as_small_and_large_as_float16_allows(size: float) -> None:
    """Small ones are denormal numbers of float16, which no mode of the processor may flush to zero."""
    form = FORMS["Q8_0"]
    x, groups = drawn(form, 0, 3, 33, 2, F32)
    scales = torch.full_like(groups.scales, size)
    assert scales.float().abs().min() > 0
    weight = Groups(form, groups.codes, scales)
    assert_projects(quantized.linear(x, kept(weight, F32), None), x, weight, None)


def test_forms_of_8_bits_have_neither_minima_nor_factors() -> None:
    """AMX's products of them rely on it (kernels/linear/quantized/tiles.h)."""
    forms = [form for form in (*INTEGERS.values(), *FORMS.values()) if form.bits == 8]
    assert len(forms) > 1
    assert all((form.span, form.has_minima) == (1, False) for form in forms)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("bits", [0x7E00, 0x7FFF, -1])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_scale_that_is_no_number_makes_no_number(dtype: torch.dtype, bits: int) -> None:
    """Some NaN become 0 if they are rounded as if they were numbers."""
    x, groups = drawn(FORMS["Q8_0"], 0, 100, 33, 2, dtype)
    scales = torch.full(groups.scales.shape, bits, dtype=torch.int16).view(torch.float16)
    assert quantized.linear(x, kept(Groups(groups.form, groups.codes, scales), dtype), None).isnan().all()


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("first", "second"), [("Q4_K", "Q6_K"), ("Q5_1", "Q5_1"), ("Q8_0", "Q4_1"), ("Q5_K", "Q5_0")])
def test_experts_may_have_two_forms(first: str, second: str, dtype: torch.dtype) -> None:
    generator, count, top_k, rows = torch.Generator().manual_seed(0), 5, 2, 9
    wide, inner = 256, 512
    chosen = torch.rand(rows, count, generator=generator).topk(top_k).indices.int()
    weights = torch.rand(rows, top_k, generator=generator)
    x = torch.randn(rows, wide, generator=generator).to(dtype) / 16
    stacks = [
        [random_groups(FORMS[name], outputs, inputs, generator) for _ in range(number)]
        for name, number, outputs, inputs in ((first, 2 * count, inner, wide), (second, count, wide, inner))
    ]
    packed_stacks = [kept_experts(stacks[0], 2, dtype), kept_experts(stacks[1], 1, dtype)]
    found = experts_native.experts(x, chosen, weights, *packed_stacks, "silu_gated")
    plain = [torch.stack([groups.numbers() for groups in stack]) for stack in stacks]
    exact = experts_reference.experts(
        x.float(), chosen, weights, plain[0].view(count, 2 * inner, wide), plain[1], "silu_gated"
    )
    # Between the products, hidden states are rounded to the dtype. Their sums are of about the size of 1.
    assert (found - exact).abs().max() <= (0.05 if dtype == BF16 else 1e-4) * exact.abs().max()
    alone = experts_native.experts(x[4:5], chosen[4:5], weights[4:5], *packed_stacks, "silu_gated")
    assert torch.equal(alone[0], found[4])


@pytest.mark.parametrize(("name", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6)])
def test_what_is_packed_takes_what_the_file_has(name: str, bits: float) -> None:
    groups = random_groups(FORMS[name], 64, 256, torch.Generator().manual_seed(0))
    assert packed(groups).shape == shape_of(64, 256, FORMS[name])
    assert packed(groups).nbytes == 64 * 256 * bits / 8


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_factors_take_a_byte_instead_of_six_bits(name: str) -> None:
    groups = random_groups(FORMS[name], 64, 512, torch.Generator().manual_seed(0))
    in_file = 64 * 512 // 256 * BLOCKS[name].bytes
    assert in_file <= packed(groups).nbytes <= 1.03 * in_file


def test_experts_of_a_part_are_that_part() -> None:
    with installed():
        stack = [random_groups(FORMS["Q4_0"], 40, 64, torch.Generator().manual_seed(n)) for n in range(3)]
        experts = kept_experts(stack, 1, F32)
        assert isinstance(experts, PackedExperts) and experts.count == 3
        part = experts.part(2)
        assert isinstance(part, QuantizedWeight)
        tokens = torch.arange(40)
        assert_rounded(quantized.look_up(tokens, part), stack[2].numbers(), 2)
