"""Both nets of decoding rows, fused in C++, equal their operations' references, run one after another."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.decode import native
from baton.kernels.runtime import cpp
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net import delta_nets, kda_nets
from tests.kernels.delta_net.kinds import GATED, KDA, KINDS, Kind, name_of
from tests.kernels.delta_net.nets import BF16, DTYPES, F32, assert_only_written, assert_same_to_rounding, slots_of

many = settings(max_examples=25, deadline=None)
both = pytest.mark.parametrize("kind", KINDS, ids=name_of)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), rows=st.integers(1, 5), seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
def test_equals_the_composed_references_and_writes_nothing_else(
    kind: Kind, data: st.DataObject, rows: int, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    layout = data.draw(kind.layouts)
    found, slots = kind.drawn(layout, rows, rows + 2, dtype, seed, states), slots_of(rows, rows + 2, seed)
    before, expected = found.again(), found.again()
    y, exact = found.decode(slots, kind.decode.native), expected.decode(slots, kind.decode.reference)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)
    assert_only_written(found, before, slots.tolist())


@both
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_typical_shape(kind: Kind, dtype: torch.dtype) -> None:
    found, slots = kind.drawn(kind.typical, 5, 7, dtype), slots_of(5, 7)
    expected = found.again()
    y, exact = found.decode(slots, kind.decode.dispatched), expected.decode(slots, kind.decode.reference)
    assert_same_to_rounding(found, y, expected, exact)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), rows=st.integers(1, 4), dtype=DTYPES, states=DTYPES)
def test_a_row_is_unaffected_by_other_rows_and_by_nan_in_other_slots(
    kind: Kind, data: st.DataObject, rows: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    layout, decode = data.draw(kind.layouts), kind.decode.dispatched
    together, slots = kind.drawn(layout, rows, rows + 2, dtype, states=states), slots_of(rows, rows + 2)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, decode)
    for row, (slot, net) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(net.decode(slots, decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(net.state_pools[slot, 1], together.state_pools[slot, 1])
        assert torch.equal(net.conv_pools[slot, 1], together.conv_pools[slot, 1])


@pytest.mark.usefixtures("native_kernels")
@both
@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_threads_change_no_bit(kind: Kind, dtype: torch.dtype, states: torch.dtype, rows: int) -> None:
    first, slots = kind.drawn(kind.typical, rows, rows + 2, dtype, states=states), slots_of(rows, rows + 2)
    serial = first.again()
    expected = serial.decode(slots, kind.decode.dispatched)
    for threads in (2, 3):
        found = first.again()
        cpp.use_threads(threads)
        assert torch.equal(found.decode(slots, kind.decode.dispatched), expected)
        assert torch.equal(found.state_pools, serial.state_pools)
        assert torch.equal(found.conv_pools, serial.conv_pools)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), rows=st.integers(1, 4), seed=st.integers(0, 9))
def test_bfloat16_states_are_float32_states_stochastically_rounded(
    kind: Kind, data: st.DataObject, rows: int, seed: int
) -> None:
    layout, decode = data.draw(kind.layouts), kind.decode.dispatched
    found, slots = kind.drawn(layout, rows, rows + 2, F32, seed, BF16), slots_of(rows, rows + 2, seed)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, decode), exact.decode(slots, decode))
    assert torch.equal(found.state_pools[slots, 1], round_stochastically(exact.state_pools[slots, 1], slots * 1000))


@both
@pytest.mark.usefixtures("target")
def test_denormal_states_become_zero_and_the_callers_setting_stays(kind: Kind) -> None:
    net, slots = kind.drawn(kind.typical, 2, 4), slots_of(2, 4)
    net.state_pools.fill_(1e-39)
    net.projected.zero_()
    net.conv_pools.zero_()
    before = torch.tensor(1e-39) + 0
    net.decode(slots, kind.decode.dispatched)
    written = net.state_pools[slots, 1]
    assert not ((written != 0) & (written.abs() < torch.finfo(F32).tiny)).any()
    assert torch.tensor(1e-39) + 0 == before


def saturated_gated() -> tuple[Tensor, ...]:
    [projected] = GATED.drawn(GATED.typical, 4, 6).inputs
    gates = projected[:, -2 * delta_nets.TYPICAL.all_heads :]
    gates[:] = torch.tensor([-200.0, 200.0]).repeat_interleave(delta_nets.TYPICAL.all_heads)
    gates[2:] *= -1
    return (projected,)


def saturated_kda() -> tuple[Tensor, ...]:
    (projected, forget, gate), s = KDA.drawn(KDA.typical, 4, 6).inputs, kda_nets.TYPICAL
    projected[:, -s.heads :] = torch.tensor([-200.0, 200.0, -200.0, 200.0])[:, None]
    forget[:] = torch.tensor([200.0, -200.0]).repeat(s.heads * s.size // 2)
    gate[:] = torch.tensor([-200.0, 200.0]).repeat(s.heads * s.width // 2)
    return projected, forget, gate


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(("kind", "inputs"), [(GATED, saturated_gated()), (KDA, saturated_kda())], ids=["gated", "kda"])
def test_gates_far_from_zero(kind: Kind, inputs: tuple[Tensor, ...]) -> None:
    """With saturated gates, nothing is written, or values are replaced, or states or channels are forgotten."""
    found, slots = kind.drawn(kind.typical, 4, 6), slots_of(4, 6)
    for target, values in zip(found.inputs, inputs, strict=True):
        target[:] = values
    expected = found.again()
    y, exact = found.decode(slots, kind.decode.dispatched), expected.decode(slots, kind.decode.reference)
    assert y.isfinite().all()
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    net, s = GATED.drawn(GATED.typical, 2, 4), slots_of(2, 4)
    [projected], constants, (conv, state) = net.inputs, net.constants, net.pools
    assert isinstance(constants, DeltaConstants)
    for rows, pools, slots, fault in [
        (projected[:, 1:], (conv, state), s, "a row of projected is"),
        (projected.t().contiguous().t(), (conv, state), s, "a row of projected is"),
        (projected, (conv[:, 1:], state), s, "a row of the convolution's pool is"),
        (projected, (conv, state[:, :7]), s, "channels do not fit"),
        (projected, (conv, state.transpose(2, 3).contiguous().transpose(2, 3)), s, "a row of the pool of states"),
        (projected, (conv, state), s.int(), "int64"),
        (projected, (conv, state), s[:1], "int64"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.delta_decode(rows, constants, *pools, slots, s)


@pytest.mark.usefixtures("target")
def test_other_layouts_of_kda_are_refused() -> None:
    net, s = KDA.drawn(KDA.typical, 2, 4), slots_of(2, 4)
    (projected, forget, gate), constants, (conv, state) = net.inputs, net.constants, net.pools
    assert isinstance(constants, KdaConstants)
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
