"""The scan of packed segments in Triton: equal to the recurrence, token by token."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.mamba2.ssd import triton
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Inputs, Packed, assert_is_the_recurrence, pack, random_inputs
from tests.kernels.rounding import SIGMOID


def run(inputs: Inputs, packed: Packed, chunk_size: int = 64) -> tuple[Tensor, Tensor]:
    """Return y and this layer's pool. Slots also hold another layer's states, which must not change."""
    i, p = inputs, packed
    pools = torch.stack([i.pool, i.pool], dim=1)
    table = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, chunk_size, 1, torch.device("cpu")).table
    y = triton.ssd_prefill(i.x, i.dt, i.A, i.B, i.C, i.D, pools[:, 1], table)
    assert torch.equal(pools[:, 0], i.pool)
    return y, pools[:, 1]


@settings(max_examples=10, deadline=None)
@given(packed=packs(), seed=st.integers(0, 99), chunk_size=st.sampled_from([16, 64, 100]))
def test_equals_the_recurrence_at_every_checkpoint(packed: Packed, seed: int, chunk_size: int) -> None:
    inputs = random_inputs(packed.tokens, packed.pool_size, seed, heads=2, groups=1)
    assert_is_the_recurrence(*run(inputs, packed, chunk_size), inputs, packed, chunk_size)


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (3, 3), (6, 2)])
def test_heads_read_their_group(heads: int, groups: int) -> None:
    packed = pack([50, 7], [0, 30], [(0, 33)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 1, heads, groups)
    assert_is_the_recurrence(*run(inputs, packed), inputs, packed)


def test_second_request_of_a_packed_prefill_gets_its_own_state_sglang_15829() -> None:
    """A request's checkpoint has its own state; tests/kernels/mamba2/test_ssd.py explains the bug under this name."""
    packed = pack([100, 300], [0, 0], [(1, 256)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 15829, heads=2, groups=1)
    inputs.pool.zero_()
    assert_is_the_recurrence(*run(inputs, packed, chunk_size=128), inputs, packed, chunk_size=128)


def test_strong_decay_underflows_to_zero_and_not_to_nan() -> None:
    packed = pack([64, 30], [0, 5], [(0, 64)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 4, heads=2, groups=1)
    inputs.dt.fill_(4)
    inputs.A.fill_(-32)
    assert_is_the_recurrence(*run(inputs, packed), inputs, packed)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.05, 0.9)])
def test_dt_is_computed_from_the_projection(limits: tuple[float, float]) -> None:
    packed = pack([20, 7], [0, 60], [])
    inputs = random_inputs(packed.tokens, packed.pool_size, 5, heads=3, groups=1)
    i, bias = inputs, torch.tensor([-9.0, 0.0, 3.0])
    raw = torch.cat([i.x[:, :, 0] * 3, i.dt], dim=1)[:, :3]
    table = plan_prefill(packed.offsets, packed.starts, packed.slots, [], 64, 1, torch.device("cpu")).table
    pool = i.pool.clone()
    y = triton.ssd_prefill(i.x, raw, i.A, i.B, i.C, i.D, pool, table, dt_bias=bias, dt_limits=limits)
    inputs.dt = F.softplus(raw + bias).clamp(*limits)
    assert_is_the_recurrence(y, pool, inputs, packed, terms=SIGMOID)
