"""One token of the convolution for each row, in Triton: equal to the reference."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.conv1d import reference, triton_update
from tests.kernels.conv1d.test_conv1d import assert_convolved
from tests.kernels.packing import Packed
from tests.kernels.rounding import SIGMOID, assert_rounded


@pytest.mark.parametrize("is_biased", [True, False])
@given(
    rows=st.integers(0, 4),
    channels=st.one_of(st.integers(1, 40), st.integers(250, 600)),
    kernel=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None)
def test_equals_the_reference_and_writes_nothing_else(
    is_biased: bool, rows: int, channels: int, kernel: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels + 7, generator=g)[:, 3 : channels + 3]
    taps, bias = torch.randn(kernel, channels, generator=g), torch.randn(channels, generator=g)
    memory = torch.randn(rows + 2, 3, kernel - 1, channels, generator=g)
    slots, expected = torch.randperm(rows + 2, generator=g)[:rows], memory.clone()
    y = triton_update.conv1d_update(x, taps, bias if is_biased else None, memory[:, 1], slots)
    before, added = expected[:, 1].clone(), bias if is_biased else None
    exact = reference.conv1d_update(x, taps, added, expected[:, 1], slots)
    packed = Packed([*range(rows + 1)], [0] * rows, slots.tolist(), [], rows + 2)
    assert_convolved(y, exact, x, taps, added, before, packed)
    assert torch.equal(memory, expected)


def test_a_row_gets_the_same_alone_and_with_padding_rows_that_share_a_slot() -> None:
    g = torch.Generator().manual_seed(0)
    x, taps, pool = torch.randn(5, 300, generator=g), torch.randn(4, 300, generator=g), torch.randn(6, 3, 300)
    together, alone = pool.clone(), pool.clone()
    y = triton_update.conv1d_update(x, taps, None, together, torch.tensor([4, 0, 2, 2, 2]))
    for row, slot in enumerate([4, 0]):
        exact = triton_update.conv1d_update(x[row : row + 1], taps, None, alone, torch.tensor([slot]))
        assert torch.equal(y[row], exact[0])
    alone[2] = together[2]
    assert torch.equal(together, alone)


def test_far_from_zero_silu_does_not_overflow() -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, torch.nan]])
    y = triton_update.conv1d_update(x, torch.ones(1, 5), None, torch.empty(1, 0, 5), torch.tensor([0]))
    assert_rounded(y, torch.nn.functional.silu(x), SIGMOID)
