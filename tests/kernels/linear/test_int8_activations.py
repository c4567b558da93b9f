"""Products of integer weights and inputs rounded to 8 bits, on each target of this CPU, in every form of a weight."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear import int8_activations, quantized
from baton.kernels.linear.int8_activations import reference
from baton.kernels.linear.quantized import Form, Groups, QuantizedWeight, keep
from baton.kernels.linear.quantized.forms import INTEGERS
from baton.kernels.linear.quantized.native import random_groups
from baton.kernels.moe.experts import PARTS, Activation, native as experts
from baton.kernels.moe.experts.packed import keep as keep_experts
from baton.kernels.moe.experts.reference import ACTIVATIONS
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import Target
from baton.models.gguf.blocks import BLOCKS
from baton.models.layers.experts import Experts
from baton.models.layers.linear import Linear
from baton.models.loading.integers import round_inputs
from tests.kernels.linear.test_forms import exact_product
from tests.kernels.rounding import assert_rounded

F32, BF16 = torch.float32, torch.bfloat16
FORMS = {name: block.form for name, block in BLOCKS.items()} | {f"int{bits}": form for bits, form in INTEGERS.items()}
few = settings(max_examples=15, deadline=None)


def drawn(form: Form, seed: int, rows: int, outputs: int, spans: int, dtype: torch.dtype) -> tuple[Tensor, Groups]:
    """Return x [rows, inputs] and a weight [outputs, inputs]. spans: of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    groups = random_groups(form, outputs, spans * form.width, generator)
    x = torch.randn(rows, spans * form.width, generator=generator).to(dtype)
    return without_ties(x, reference.group_of(form)), groups


def without_ties(x: Tensor, group: int) -> Tensor:
    """Return x with 0 for inputs close to halfway between two integers, which some targets would round differently."""
    largest = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group).abs().amax(2)
    scaled = x.float() * (127 / largest).repeat_interleave(group, 1)[:, : x.shape[1]]
    return torch.where((scaled.frac().abs() - 0.5).abs() < 1e-3, 0, x)


def kept(groups: Groups, dtype: torch.dtype) -> QuantizedWeight:
    outputs, inputs = groups.codes.shape
    return keep(groups.split(64), groups.form, outputs, inputs, dtype)


def run(x: Tensor, groups: Groups, bias: Tensor | None = None) -> Tensor:
    return int8_activations.linear(x, kept(groups, x.dtype), bias)


def assert_projects(y: Tensor, x: Tensor, groups: Groups, bias: Tensor | None) -> None:
    """Check y against the exact product with the rounded inputs."""
    width = groups.codes.shape[1]
    exact, size = exact_product(rounded(F.pad(x, (0, width - x.shape[1])), groups.form), groups.numbers(), groups, bias)
    assert y.dtype == x.dtype
    assert_rounded(y, exact, 2 * -(-width // groups.form.group) + 6, size)


def rounded(x: Tensor, form: Form) -> Tensor:
    """Return the numbers that rounded inputs stand for, float64 [rows, inputs]."""
    group = reference.group_of(form)
    codes, scales = reference.round_inputs(x, group)
    return (codes.double() * scales.double().repeat_interleave(group, 1))[:, : x.shape[1]]


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("name", FORMS)
@few
@given(
    seed=st.integers(0, 99), rows=st.integers(1, 20), outputs=st.integers(1, 70), spans=st.integers(1, 3),
    dtype=st.sampled_from([F32, BF16]), bias=st.booleans(),
)  # fmt: skip
def test_a_product_equals_the_exact_one_of_rounded_inputs(
    name: str, seed: int, rows: int, outputs: int, spans: int, dtype: torch.dtype, bias: bool
) -> None:
    x, groups = drawn(FORMS[name], seed, rows, outputs, spans, dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    assert_projects(run(x, groups, added), x, groups, added)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_gets_the_same_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    """The rows are more than are rounded at once, and the inputs end within a group where the form allows it."""
    x, groups = drawn(FORMS[name], 0, 400, 70, 2, dtype)
    weight = kept(groups, dtype)
    together = int8_activations.linear(x, weight, None)
    for row in (0, 5, 6, 95, 96, 383, 384, 399):
        assert torch.equal(int8_activations.linear(x[row : row + 1], weight, None)[0], together[row])
    wide = F.pad(x, (0, 3), value=torch.nan)
    assert torch.equal(int8_activations.linear(wide[:, : x.shape[1]], weight, None), together)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("rows", [1, 5, 50])
@pytest.mark.parametrize("bits", [4, 8])
def test_threads_change_no_bit(bits: int, rows: int) -> None:
    x, groups = drawn(INTEGERS[bits], 0, rows, 1000, 15, BF16)
    serial = run(x, groups)
    for threads in (2, 3):
        cpp.use_threads(threads)
        assert torch.equal(run(x, groups), serial)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [1, 63, 65, 100])
def test_inputs_may_end_within_a_group(bits: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = random_groups(INTEGERS[bits], 40, inputs, generator)
    weight = replace(kept(groups, F32), inputs=inputs)
    for rows in (1, 9):
        x = without_ties(torch.randn(rows, inputs, generator=generator), 64)
        assert_projects(int8_activations.linear(x, weight, None), x, groups, None)


@pytest.mark.usefixtures("native_kernels")
def test_an_input_is_further_off_than_half_a_step_only_if_it_is_tiny() -> None:
    """The weight is an identity, so the outputs are the rounded inputs."""
    groups = Groups(INTEGERS[8], torch.eye(128, dtype=torch.int8), torch.ones(128, 2, dtype=BF16))
    for size in (1.0, 1e-20, 1e30):
        x = torch.randn(7, 128) * size
        step = x.view(7, 2, 64).abs().amax(2).repeat_interleave(64, 1) / 127
        assert ((run(x, groups) - x).abs() <= 0.5001 * step).all()
    assert (run(torch.full((3, 128), 1e-35), groups) == 0).all()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_an_input_that_is_not_finite_shows_in_its_row_only(name: str, value: float) -> None:
    x, groups = drawn(FORMS[name], 0, 9, 40, 1, F32)
    expected = run(x, groups)
    x[4, 17] = value
    found = run(x, groups)
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.usefixtures("native_kernels")
def test_only_quantized_parts_of_a_layer_round_their_inputs() -> None:
    """The last outputs stay floats, as those of decays and gates do, and so do their inputs."""
    layer, plain = Linear(64, 48, bias=True, dtype=F32, floats=8), Linear(64, 48, bias=True, dtype=F32)
    for each in (layer, plain):
        torch.nn.init.normal_(each.weight, generator=torch.Generator().manual_seed(0))
        torch.nn.init.zeros_(each.bias)
    assert not round_inputs(plain)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    layer.pack(8)
    before = layer(x)
    assert round_inputs(layer)
    after = layer(x)
    assert torch.equal(before[:, 40:], after[:, 40:])
    assert (before[:, :40] != after[:, :40]).all()
    assert (before - after).abs().max() < 0.2


def test_targets_without_products_of_bytes_do_not_pay(target: Target) -> None:
    """They compute the same, but floats are faster there."""
    assert int8_activations.pays() == bool(target.needs & {"avx512_vnni", "avx_vnni", "asimddp"})


def test_without_native_code_nothing_pays() -> None:
    cpp.uninstall()
    assert not int8_activations.pays()


@pytest.mark.usefixtures("native_kernels")
def test_look_ups_are_not_rounded() -> None:
    """A tied table is both an embedding and a projection."""
    _, groups = drawn(FORMS["Q4_K"], 0, 1, 40, 1, F32)
    weight, tokens = kept(groups, F32), torch.tensor([3, 39])
    rounding = replace(weight, rounds_inputs=True)
    assert torch.equal(quantized.look_up(tokens, rounding), quantized.look_up(tokens, weight))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("activation", list(PARTS))
@pytest.mark.parametrize(("first", "second"), [("Q4_K", "Q6_K"), ("Q8_0", "Q5_1"), ("int4", "int8")])
def test_experts_round_what_both_of_their_projections_take(
    first: str, second: str, activation: Activation, dtype: torch.dtype
) -> None:
    """Rounding changes results by about half a percent. Where sums differ in their last bit, a hidden state may be
    rounded to the next integer, which is a tenth of that, for a few of them.
    """
    generator, (rows, count, top_k), (wide, inner) = torch.Generator().manual_seed(0), (9, 5, 2), (256, 512)
    chosen = torch.rand(rows, count, generator=generator).topk(top_k).indices.int()
    chosen[2, 1] = -1  # padding
    weights = torch.rand(rows, top_k, generator=generator)
    x = without_ties(torch.randn(rows, wide, generator=generator).to(dtype) / 16, 64)
    forms = FORMS[first], FORMS[second]
    sizes = (PARTS[activation] * count, inner, wide), (count, wide, inner)
    stacks = [
        [random_groups(form, outputs, inputs, generator) for _ in range(number)]
        for form, (number, outputs, inputs) in zip(forms, sizes, strict=True)
    ]
    kept_stacks = [
        keep_experts(enumerate(stack), form, size, size[0] // count, dtype)
        for stack, form, size in zip(stacks, forms, sizes, strict=True)
    ]
    rounding = [replace(stack, rounds_inputs=True) for stack in kept_stacks]
    found = experts.experts(x, chosen, weights, *rounding, activation)
    plain = [torch.stack([groups.numbers() for groups in stack]) for stack in stacks]
    exact = torch.zeros(rows, wide)
    for row, k in [(row, k) for row in range(rows) for k in range(top_k) if chosen[row, k] >= 0]:
        matrices = plain[0].view(count, -1, wide)[chosen[row, k]]
        hidden = ACTIVATIONS[activation](rounded(x[row : row + 1], forms[0]).float() @ matrices.t()).to(dtype)
        exact[row] += weights[row, k] * (rounded(hidden, forms[1]).float() @ plain[1][chosen[row, k]].t())[0]
    assert (found - exact).norm() <= (4e-3 if dtype == BF16 else 1e-3) * exact.norm()
    if dtype == F32:
        assert (experts.experts(x, chosen, weights, *kept_stacks, activation) - exact).norm() > 3e-3 * exact.norm()
    alone = experts.experts(x[4:5], chosen[4:5], weights[4:5], *rounding, activation)
    assert torch.equal(alone[0], found[4])


@pytest.mark.usefixtures("native_kernels")
def test_quantized_experts_of_a_model_round_their_inputs() -> None:
    layer = Experts(64, 32, 3, "silu_gated", F32)
    for weight in (layer.input_linear, layer.output_linear):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    x, chosen, weights = torch.randn(4, 64), torch.tensor([[0, 2]] * 4, dtype=torch.int32), torch.rand(4, 2)
    layer.pack(8)
    before = layer(x, chosen, weights)
    assert round_inputs(layer)
    after = layer(x, chosen, weights)
    assert 1e-3 * before.norm() < (before - after).norm() < 0.05 * before.norm()
