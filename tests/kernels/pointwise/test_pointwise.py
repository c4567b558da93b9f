"""Operations on single numbers and rows: references compared with definitions, native forms with references."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.activations import native as activations, reference, sigmoid_gate, silu_multiply, squared_relu
from baton.kernels.attention.paged import native as attention, reference as paged, write_pages
from baton.kernels.attention.rotary import native as rotary, rotate
from baton.kernels.attention.rotary.reference import rotate as rotate_by_definition
from tests.kernels.rounding import SIGMOID, assert_rounded, largest

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
many = settings(max_examples=40, deadline=None)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_definitions() -> None:
    x = drawn(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    assert_rounded(reference.silu_multiply(x), gate / (1 + (-gate).exp()) * up, SIGMOID + 1)
    assert_rounded(reference.squared_relu(x), x.clamp(min=0) ** 2, 1)
    turned = rotate_by_definition(torch.tensor([[[3.0, 0.0, 5.0, 7.0]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    assert turned.flatten().tolist() == [0.0, 3.0, 5.0, 7.0], "a quarter turn of the first two"


@pytest.mark.usefixtures("target")
@many
@given(rows=st.integers(0, 40), width=st.integers(1, 300), dtype=DTYPES)
def test_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    x = 8 * drawn(rows, 2 * width).to(dtype)
    assert activations.takes(x)
    assert_rounded(silu_multiply(x), reference.silu_multiply(x.float()), SIGMOID + 1)
    assert_rounded(squared_relu(x), reference.squared_relu(x.float()), 1)


def test_a_gate_is_a_sigmoid() -> None:
    x, gate = drawn(2, 4, 5)
    assert_rounded(reference.sigmoid_gate(x, gate), x / (1 + (-gate).exp()), SIGMOID + 1)
    of_halves = gate[:, [0, 0, 1, 1]]
    assert_rounded(reference.sigmoid_gate(x[:, :4], gate[:, :2]), x[:, :4] / (1 + (-of_halves).exp()), SIGMOID + 1)


@pytest.mark.usefixtures("target")
@many
@given(rows=st.integers(0, 40), width=st.integers(1, 300), sharing=st.sampled_from([1, 1, 2, 7, 64]), dtype=DTYPES)
def test_gates(rows: int, width: int, sharing: int, dtype: torch.dtype) -> None:
    x, gate = 8 * drawn(rows, width * sharing).to(dtype), 8 * drawn(rows, width, seed=1).to(dtype)
    assert activations.takes_gated(x, gate)
    found = sigmoid_gate(x, gate)
    assert found.dtype == dtype
    assert_rounded(found, reference.sigmoid_gate(x.float(), gate.float()), SIGMOID + 1)
    for row in range(rows):
        assert torch.equal(sigmoid_gate(x[row:][:1], gate[row:][:1])[0], found[row])


@pytest.mark.usefixtures("native_kernels")
def test_gates_of_other_layouts_are_left_to_torch() -> None:
    x = drawn(3, 8)
    assert not activations.takes_gated(x, x[:, :3].contiguous())
    assert not activations.takes_gated(x, x[:2])
    assert not activations.takes_gated(x, x.bfloat16())
    assert not activations.takes_gated(x[:, :4], x[:, 4:])


@pytest.mark.usefixtures("target")
def test_nan_stays_nan() -> None:
    x = torch.full((1, 66), torch.nan)
    assert silu_multiply(x).isnan().all() and squared_relu(x).isnan().all()
    assert sigmoid_gate(x, torch.ones(1, 66)).isnan().all()
    assert sigmoid_gate(torch.ones(1, 66), x).isnan().all()


@pytest.mark.usefixtures("target")
@many
@given(
    tokens=st.integers(0, 40),
    heads=st.integers(1, 5),
    half=st.integers(1, 70),
    first=st.one_of(st.just(0), st.integers(1, 140)),
    rest=st.one_of(st.just(0), st.integers(1, 140)),
    dtype=DTYPES,
)
def test_rotation(tokens: int, heads: int, half: int, first: int, rest: int, dtype: torch.dtype) -> None:
    x, angle = drawn(tokens, heads, first + 2 * half + rest).to(dtype), drawn(tokens, 1, half, seed=1).repeat(1, 1, 2)
    assert rotary.takes(x, angle.cos(), angle.sin(), first)
    found = rotate(x, angle.cos(), angle.sin(), first)
    assert_rounded(found, rotate_by_definition(x.float(), angle.cos(), angle.sin(), first), 2, 2 * largest(x))
    assert torch.equal(found[..., first + 2 * half :], x[..., first + 2 * half :])
    assert torch.equal(found[..., :first], x[..., :first])
    turned = rotate(x[..., first:].contiguous(), angle.cos(), angle.sin())
    assert torch.equal(found[..., first:], turned)


@pytest.mark.usefixtures("native_kernels")
def test_angles_that_do_not_fit_are_not_taken() -> None:
    x = drawn(3, 2, 8)
    for shape in [(3, 1, 10), (2, 1, 8), (3, 2, 8)]:
        assert not rotary.takes(x, torch.ones(shape), torch.ones(shape))
    assert not rotary.takes(x, torch.ones(3, 1, 6), torch.ones(3, 1, 6), 3)


@pytest.mark.usefixtures("target")
@many
@given(
    places=st.lists(st.integers(0, 4 * 8 - 1), unique=True),
    heads=st.integers(1, 3),
    width=st.integers(1, 40),
    dtype=DTYPES,
)
def test_written_pages(places: list[int], heads: int, width: int, dtype: torch.dtype) -> None:
    """Only the entries at `places` change, in pages that are interleaved with another layer's."""
    memory = drawn(8, 3, 4, heads, width).to(dtype)
    keys, values = drawn(2, len(places), heads, width, seed=1).to(dtype)
    expected, at = memory.clone(), torch.tensor(places, dtype=torch.int64)
    paged.write_pages(keys, values, expected[:, 1], expected[:, 2], at)
    assert attention.takes_written(keys, values, memory[:, 1], memory[:, 2])
    write_pages(keys, values, memory[:, 1], memory[:, 2], at)
    assert torch.equal(memory, expected)


@pytest.mark.usefixtures("native_kernels")
def test_places_that_do_not_fit_are_refused() -> None:
    keys, pages = drawn(2, 1, 4), torch.zeros(3, 2, 1, 4)
    with pytest.raises(ValueError, match="places must be 2"):
        attention.write_pages(keys, keys, pages, pages, torch.tensor([1]))
