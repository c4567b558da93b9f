"""The convolution of packed segments in Triton: equal to the reference, and independent of how a prompt is cut."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.conv1d import reference, triton
from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.prefill.convolution import plan_conv
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.conv1d.test_conv1d import assert_convolved
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack

CPU = torch.device("cpu")
few = settings(max_examples=20, deadline=None)


def table_of(packed: Packed, kernel: int, chunk_size: int = 64) -> ChunkTable:
    p = packed
    return plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, chunk_size, kernel, CPU).table


def drawn(packed: Packed, channels: int, kernel: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x (columns of a wider tensor), taps, bias, and memory in which slots hold two layers' states."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(packed.tokens, channels + 5, generator=g)[:, 3 : 3 + channels]
    taps, bias = torch.randn(kernel, channels, generator=g), torch.randn(channels, generator=g)
    return x, taps, bias, torch.randn(packed.pool_size, 2, kernel - 1, channels, generator=g)


@few
@given(
    packed=packs(),
    channels=st.one_of(st.integers(1, 70), st.sampled_from([128, 300])),
    kernel=st.integers(1, 6),
    chunk_size=st.sampled_from([16, 50, 64]),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_equals_the_reference_and_writes_nothing_else(
    packed: Packed, channels: int, kernel: int, chunk_size: int, has_bias: bool, seed: int
) -> None:
    x, taps, drawn_bias, pools = drawn(packed, channels, kernel, seed)
    bias, expected = drawn_bias if has_bias else None, pools.clone()
    y = triton.conv1d_prefill(x, taps, bias, pools[:, 1], table_of(packed, kernel, chunk_size))
    plan = plan_conv(packed.offsets, packed.starts, packed.slots, packed.checkpoints, kernel, CPU)
    before = expected[:, 1].clone()
    assert_convolved(y, reference.conv1d_prefill(x, taps, bias, expected[:, 1], plan), x, taps, bias, before, packed)
    assert torch.equal(pools, expected)


@pytest.mark.parametrize("kernel", [4, 6])
def test_checkpoints_closer_together_than_the_kernel_is_wide(kernel: int) -> None:
    """Chunks of one and two tokens take their inputs from the slot and from several chunks before them."""
    packed = pack([4, 9, 1], [60, 3, 0], [(0, 61), (0, 63), (0, 64), (1, 4), (1, 5), (1, 5), (1, 7), (2, 1)])
    x, taps, bias, pools = drawn(packed, 20, kernel, 1)
    expected = pools.clone()
    y = triton.conv1d_prefill(x, taps, bias, pools[:, 1], table_of(packed, kernel))
    plan = plan_conv(packed.offsets, packed.starts, packed.slots, packed.checkpoints, kernel, CPU)
    before = expected[:, 1].clone()
    assert_convolved(y, reference.conv1d_prefill(x, taps, bias, expected[:, 1], plan), x, taps, bias, before, packed)
    assert torch.equal(pools, expected)


@few
@given(packed=packs(), kernel=st.integers(2, 5))
def test_a_segment_gets_the_same_among_states_and_inputs_of_nan(packed: Packed, kernel: int) -> None:
    x, taps, bias, pools = drawn(packed, 20, kernel, 0)
    expected = pools.clone()
    exact = triton.conv1d_prefill(x, taps, bias, expected[:, 1], table_of(packed, kernel))
    own, rows = packed.slots[-1], slice(packed.offsets[-2], None)
    pools[[slot for slot in range(packed.pool_size) if slot != own]] = torch.nan
    x[: packed.offsets[-2]] = torch.nan
    y = triton.conv1d_prefill(x, taps, bias, pools[:, 1], table_of(packed, kernel))
    assert torch.equal(y[rows], exact[rows])
    assert torch.equal(pools[own], expected[own])


def test_one_token_at_a_time_is_the_same_bits() -> None:
    packed = Packed([0, 12], [0], [1], [], 2)
    x, taps, bias, pools = drawn(packed, 20, 4, 0)
    expected = pools.clone()
    exact = triton.conv1d_prefill(x, taps, bias, expected[:, 1], table_of(packed, 4))
    for token in range(12):
        table = table_of(Packed([0, 1], [token], [1], [], 2), 4)
        y = triton.conv1d_prefill(x[token : token + 1], taps, bias, pools[:, 1], table)
        assert torch.equal(y[0], exact[token])
    assert torch.equal(pools, expected)
