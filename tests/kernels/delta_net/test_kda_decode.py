"""Kimi Delta Attention of decoding rows, fused in C++, equals its operations' references, run one after another."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.decode import kda_decode, native, reference
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net.kda_nets import (
    BF16,
    DTYPES,
    F32,
    LAYOUTS,
    TYPICAL,
    KdaLayout,
    assert_only_written,
    assert_same_to_rounding,
    drawn,
    slots_of,
)
from tests.kernels.installed import installed, runnable

many = settings(max_examples=40, deadline=None)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, rows=st.integers(1, 5), seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
def test_equals_the_composed_references_and_writes_nothing_else(
    layout: KdaLayout, rows: int, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    found, slots = drawn(layout, rows, rows + 2, dtype, seed, states), slots_of(rows, rows + 2, seed)
    before, expected = found.again(), found.again()
    y, exact = found.decode(slots, native.kda_decode), expected.decode(slots, reference.kda_decode)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)
    assert_only_written(found, before, slots.tolist())


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_typical_shape(dtype: torch.dtype) -> None:
    found, slots = drawn(TYPICAL, 5, 7, dtype), slots_of(5, 7)
    expected = found.again()
    y, exact = found.decode(slots, kda_decode), expected.decode(slots, reference.kda_decode)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, rows=st.integers(1, 4), dtype=DTYPES, states=DTYPES)
def test_a_row_is_unaffected_by_other_rows_and_by_nan_in_other_slots(
    layout: KdaLayout, rows: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    together, slots = drawn(layout, rows, rows + 2, dtype, states=states), slots_of(rows, rows + 2)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, kda_decode)
    for row, (slot, net) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(net.decode(slots, kda_decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(net.state_pools[slot, 1], together.state_pools[slot, 1])
        assert torch.equal(net.conv_pools[slot, 1], together.conv_pools[slot, 1])


@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_threads_change_no_bit(dtype: torch.dtype, states: torch.dtype, rows: int) -> None:
    first, slots = drawn(TYPICAL, rows, rows + 2, dtype, states=states), slots_of(rows, rows + 2)
    serial = first.again()
    with installed(runnable()[0], threads=1):
        expected = serial.decode(slots, kda_decode)
    for threads in (2, 3):
        found = first.again()
        with installed(runnable()[0], threads=threads):
            assert torch.equal(found.decode(slots, kda_decode), expected)
        assert torch.equal(found.state_pools, serial.state_pools)
        assert torch.equal(found.conv_pools, serial.conv_pools)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, rows=st.integers(1, 4), seed=st.integers(0, 9))
def test_bfloat16_states_are_float32_states_stochastically_rounded(layout: KdaLayout, rows: int, seed: int) -> None:
    found, slots = drawn(layout, rows, rows + 2, F32, seed, BF16), slots_of(rows, rows + 2, seed)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, kda_decode), exact.decode(slots, kda_decode))
    assert torch.equal(found.state_pools[slots, 1], round_stochastically(exact.state_pools[slots, 1], slots * 1000))


@pytest.mark.usefixtures("target")
def test_denormal_states_become_zero_and_the_callers_setting_stays() -> None:
    net, slots = drawn(TYPICAL, 2, 4), slots_of(2, 4)
    net.state_pools.fill_(1e-39)
    net.projected[:, : TYPICAL.channels] = 0
    net.conv_pools.zero_()
    before = torch.tensor(1e-39) + 0
    net.decode(slots, kda_decode)
    written = net.state_pools[slots, 1]
    assert not ((written != 0) & (written.abs() < torch.finfo(F32).tiny)).any()
    assert torch.tensor(1e-39) + 0 == before


@pytest.mark.usefixtures("target")
def test_gates_far_from_zero() -> None:
    """With saturated gates, nothing is written, or values are replaced, and half the channels are forgotten."""
    found, slots = drawn(TYPICAL, 4, 6), slots_of(4, 6)
    found.projected[:, -TYPICAL.heads :] = torch.tensor([-200.0, 200.0, -200.0, 200.0])[:, None]
    found.forget[:] = torch.tensor([200.0, -200.0]).repeat(TYPICAL.heads * TYPICAL.size // 2)
    found.gate[:] = torch.tensor([-200.0, 200.0]).repeat(TYPICAL.heads * TYPICAL.width // 2)
    expected = found.again()
    y, exact = found.decode(slots, kda_decode), expected.decode(slots, reference.kda_decode)
    assert y.isfinite().all()
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    net, s = drawn(TYPICAL, 2, 4), slots_of(2, 4)
    projected, forget, gate, constants, conv, state = net.arguments()
    for tensors, pools, slots, fault in [
        ((projected[:, 1:], forget, gate), (conv, state), s, "a row of projected is"),
        ((projected.t().contiguous().t(), forget, gate), (conv, state), s, "a row of projected is"),
        ((projected, forget[:, 1:], gate), (conv, state), s, "a row of forget is"),
        ((projected, forget, gate[:, 1:]), (conv, state), s, "a row of gate is"),
        ((projected, forget, gate), (conv[:, 1:], state), s, "a row of the convolution's pool is"),
        ((projected, forget, gate), (conv, state[:, :3]), s, "channels do not fit"),
        ((projected, forget, gate), (conv, state.mT.contiguous().mT), s, "a row of the pool of states"),
        ((projected, forget, gate), (conv, state), s.int(), "int64"),
        ((projected, forget, gate), (conv, state), s[:1], "int64"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.kda_decode(*tensors, constants, *pools, slots, s)
