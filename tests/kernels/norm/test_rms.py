"""Residual addition and RMS norm: the reference against its definition, the native form against the reference."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.norm.rms import add_rms_norm, native as rms_norm, reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import Target
from tests.kernels.installed import library_for, runnable
from tests.kernels.rounding import assert_rounded, norm_terms

DTYPES = (torch.float32, torch.bfloat16)


def draw(seed: int, rows: int, hidden: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random residual, x and weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, hidden), (rows, hidden), (hidden,))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return drawn[0], drawn[1], drawn[2]


def assert_native_agrees(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float, offset: float = 0.0
) -> None:
    assert rms_norm.takes(residual, x, weight)
    before = residual.clone()
    added, normed = add_rms_norm(residual, x, weight, eps, multiplier, offset)
    expected_sum, expected = reference.add_rms_norm(residual, x, weight, eps, multiplier, offset)
    assert torch.equal(residual, before)
    addend = 0.0 if x is None else abs(multiplier) * x.float().abs()
    assert_rounded(added, expected_sum, 2, residual.float().abs() + addend)
    exact = reference.add_rms_norm(added, None, weight.float(), eps, offset=offset)[1]
    assert_rounded(normed, exact, norm_terms(exact.shape[1]))
    assert (added.dtype, normed.dtype) == (residual.dtype, expected.dtype)


def test_definition() -> None:
    residual, x, weight = draw(0, 3, 10, (torch.float32,) * 3)
    added, normed = reference.add_rms_norm(residual, x, weight, 1e-3, 0.5)
    assert_rounded(added, residual + 0.5 * x, 2, residual.abs() + x.abs())
    for row in range(3):
        expected = added[row] / (added[row].square().mean() + 1e-3).sqrt() * weight
        assert_rounded(normed[row], expected, norm_terms(10))


def test_an_offset_is_added_to_the_weight_before_anything_is_rounded() -> None:
    residual, _, weight = draw(0, 3, 10, (torch.bfloat16,) * 3)
    weight = weight / 64
    exact = reference.add_rms_norm(residual.float(), None, 1 + weight.float(), 1e-3)[1]
    assert torch.equal(reference.add_rms_norm(residual, None, weight, 1e-3, offset=1.0)[1], exact.bfloat16())


def test_nothing_to_add() -> None:
    residual, _, weight = draw(1, 3, 10, DTYPES[:1] * 3)
    added, normed = reference.add_rms_norm(residual, None, weight, 1e-3, 0.5)
    assert torch.equal(added, residual)
    zero = torch.zeros_like(residual)
    assert torch.equal(normed, reference.add_rms_norm(residual, zero, weight, 1e-3)[1])


@pytest.mark.usefixtures("native_kernels")
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(0, 40),
    hidden=st.integers(1, 600),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    adds=st.booleans(),
    multiplier=st.sampled_from([1.0, 0.22]),
    offset=st.sampled_from([0.0, 1.0]),
)
def test_native_agrees(
    seed: int, rows: int, hidden: int, dtypes: tuple[torch.dtype, ...], adds: bool, multiplier: float, offset: float
) -> None:
    residual, x, weight = draw(seed, rows, hidden, dtypes)
    assert_native_agrees(residual, x if adds else None, weight, 1e-5, multiplier, offset)


@pytest.fixture(params=runnable()[1:], ids=lambda target: target.name)
def other_target(request: pytest.FixtureRequest) -> Iterator[Target]:
    assert cpp.install(library_for(request.param), threads=1) == {}
    yield request.param
    cpp.uninstall()


@pytest.mark.soak
@pytest.mark.usefixtures("other_target")
def test_every_set_of_instructions_agrees() -> None:
    for seed, dtypes in enumerate(product(DTYPES, repeat=3)):
        for rows, hidden in ((1, 768), (33, 100), (5, 15)):
            residual, x, weight = draw(seed, rows, hidden, dtypes)
            assert_native_agrees(residual, x, weight, 1e-5, 0.7)


@pytest.mark.usefixtures("native_kernels")
def test_a_row_is_the_same_among_others_and_with_more_threads() -> None:
    residual, x, weight = draw(3, 300, 193, (torch.float32, torch.bfloat16, torch.bfloat16))
    together = add_rms_norm(residual, x, weight, 1e-5)
    cpp.use_threads(2)
    threaded = add_rms_norm(residual, x, weight, 1e-5)
    for row in (0, 7, 299):
        alone = add_rms_norm(residual[row : row + 1], x[row : row + 1], weight, 1e-5)
        for among in (together, threaded):
            assert torch.equal(alone[0][0], among[0][row])
            assert torch.equal(alone[1][0], among[1][row])


@pytest.mark.usefixtures("native_kernels")
def test_unsupported_arguments_go_to_the_reference() -> None:
    residual, x, weight = draw(4, 6, 32, (torch.float32,) * 3)
    for given_ in (
        (residual.double(), x, weight),
        (residual[:, ::2], x[:, ::2], weight[::2]),
        (residual, x.half(), weight),
    ):
        assert not rms_norm.takes(*given_)
        expected = reference.add_rms_norm(*given_, 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(add_rms_norm(*given_, 1e-5), expected, strict=True))


@pytest.mark.usefixtures("native_kernels")
def test_nan_stays_nan() -> None:
    residual, x, weight = draw(5, 3, 40, (torch.bfloat16,) * 3)
    residual[1, 5], x[2, 7] = float("nan"), float("inf")
    added, normed = add_rms_norm(residual, x, weight, 1e-5)
    assert added[1, 5].isnan() and added[2, 7].isinf()
    assert normed[0].isfinite().all() and normed[1].isnan().all() and normed[2, 7].isnan()
