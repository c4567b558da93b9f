"""Both nets' prefill, fused in C++, equals their operations' references, run one after another."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.prefill import native
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.delta_net import delta_nets, kda_nets
from tests.kernels.delta_net.kinds import GATED, KDA, KINDS, Kind, name_of
from tests.kernels.delta_net.nets import BF16, DTYPES, F32, Net, assert_only_written
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.prefills import (
    assert_rounded_where_kept,
    assert_same_to_rounding,
    assert_the_same_alone,
    assert_the_same_by_any_threads,
    assert_the_same_in_pieces,
)

many = settings(max_examples=20, deadline=None)
both = pytest.mark.parametrize("kind", KINDS, ids=name_of)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), packed=packs(), seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
def test_equals_the_composed_references_and_writes_nothing_else(
    kind: Kind, data: st.DataObject, packed: Packed, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    found = kind.drawn(data.draw(kind.layouts), packed.tokens, packed.pool_size, dtype, seed, states)
    before, expected = found.again(), found.again()
    y, exact = found.prefill(packed, kind.prefill.native), expected.prefill(packed, kind.prefill.reference)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)
    assert_only_written(found, before, [*packed.slots, *(slot for _, _, slot in packed.checkpoints)])


@both
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("seed", range(2))
def test_many_segments_of_the_typical_shape(kind: Kind, seed: int) -> None:
    packed = random_packed(seed)
    found = kind.drawn(kind.typical, packed.tokens, packed.pool_size, F32, seed)
    expected = found.again()
    y, exact = found.prefill(packed, kind.prefill.dispatched), expected.prefill(packed, kind.prefill.reference)
    assert_same_to_rounding(found, y, expected, exact)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), packed=packs(), dtype=DTYPES, states=DTYPES)
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(
    kind: Kind, data: st.DataObject, packed: Packed, dtype: torch.dtype, states: torch.dtype
) -> None:
    net = kind.drawn(data.draw(kind.layouts), packed.tokens, packed.pool_size, dtype, states=states)
    assert_the_same_alone(net, packed, kind.prefill.dispatched, range(len(packed.slots)))


@both
@pytest.mark.usefixtures("target")
@many
@given(
    data=st.data(),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    rest=st.integers(1, 63),
    dtype=st.sampled_from([F32, BF16]),
)
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(
    kind: Kind, data: st.DataObject, chunks: list[int], rest: int, dtype: torch.dtype
) -> None:
    ends = [*accumulate(64 * count for count in chunks)]
    net = kind.drawn(data.draw(kind.layouts), ends[-1] + rest, 3, dtype)
    assert_the_same_in_pieces(net, [*ends, ends[-1] + rest], kind.prefill.dispatched)


@pytest.mark.usefixtures("native_kernels")
@both
@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_threads_change_no_bit(kind: Kind, dtype: torch.dtype, states: torch.dtype) -> None:
    packed = pack([130, 1, 70, 33], [0, 64, 7, 300], [(0, 64), (0, 100), (2, 20)])
    net = kind.drawn(kind.typical, packed.tokens, packed.pool_size, dtype, states=states)
    assert_the_same_by_any_threads(net, packed, kind.prefill.dispatched)


@both
@pytest.mark.usefixtures("target")
@many
@given(data=st.data(), packed=packs())
def test_states_in_bfloat16_are_those_in_float32_rounded(kind: Kind, data: st.DataObject, packed: Packed) -> None:
    net = kind.drawn(data.draw(kind.layouts), packed.tokens, packed.pool_size, states=BF16)
    assert_rounded_where_kept(net, packed, kind.prefill.dispatched)


def forgetful_gated(packed: Packed) -> Net:
    """Draw a net that forgets everything at each token, with NaN in the values of the second segment."""
    net = GATED.drawn(GATED.typical, packed.tokens, packed.pool_size)
    net.constants.A.fill_(-1e4)
    net.projected[70, delta_nets.TYPICAL.inner + 5] = torch.nan
    return net


def forgetful_kda(packed: Packed) -> Net:
    """Draw a net in which every other channel forgets everything at each token, and the others at every ninth."""
    net = KDA.drawn(KDA.typical, packed.tokens, packed.pool_size)
    assert isinstance(net.constants, KdaConstants)
    projected, forget, _ = net.inputs
    net.constants.A.fill_(-1e4)
    net.constants.dt_bias.zero_()
    forget.fill_(-100)
    forget[:, ::2] = 10
    forget[::9] = 10
    projected[70, 5] = torch.nan
    return net


@both
@pytest.mark.usefixtures("target")
def test_strong_decay_ends_in_zero_and_nan_stays_in_its_segment(kind: Kind) -> None:
    packed = pack([70, 70], [0, 0], [])
    found = forgetful_gated(packed) if kind is GATED else forgetful_kda(packed)
    expected = found.again()
    y, exact = found.prefill(packed, kind.prefill.native), expected.prefill(packed, kind.prefill.reference)
    assert y[:70].isfinite().all() and y[70].isnan().any()
    slot = slice(packed.slots[0], packed.slots[0] + 1)
    assert_same_to_rounding(found, y, expected, exact, tokens=slice(70), slots=slot)


def set_equal_keys(kind: Kind, net: Net) -> None:
    """Let all tokens have the same query, key and value channels, and β = 1."""
    if kind is GATED:
        s = delta_nets.TYPICAL
        net.projected[:, s.inner : s.inner + 2 * s.keys * s.size] = net.projected[0, s.inner]
        net.projected[:, -2 * s.all_heads : -s.all_heads] = 100.0
    else:
        layout = kda_nets.TYPICAL
        net.projected[:, : 2 * layout.heads * layout.size] = net.projected[0, 0]
        net.projected[:, -layout.heads :] = 100.0


@both
@pytest.mark.usefixtures("target")
def test_keys_that_repeat_keep_only_the_last_value(kind: Kind) -> None:
    """Equal keys without decay, so that each value replaces the last, are the worst case for a chunk's equations."""
    packed = pack([130], [0], [])
    found = kind.drawn(kind.typical, packed.tokens, packed.pool_size)
    found.constants.A.zero_()
    set_equal_keys(kind, found)
    expected = found.again()
    y, exact = found.prefill(packed, kind.prefill.native), expected.prefill(packed, kind.prefill.reference)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    packed, s = pack([20, 5], [0, 0], []), delta_nets.TYPICAL
    net = GATED.drawn(s, packed.tokens, packed.pool_size)
    [projected], constants, (conv, state) = net.inputs, net.constants, net.pools
    assert isinstance(constants, DeltaConstants)
    plan = plan_prefill(packed.offsets, packed.starts, packed.slots, [], 64, s.kernel, torch.device("cpu"))
    for rows, pools, fault in [
        (projected[:, 1:], (conv, state), "is not"),
        (projected[1:], (conv, state), "is not"),
        (projected, (conv[:, 1:], state), "is not"),
        (projected, (conv, state.transpose(2, 3)), "is not"),
        (projected[:, : 7 * s.width + s.channels + 14], (conv, state[:, :7]), "do not fit"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.delta_prefill(rows, constants, *pools, plan)


@pytest.mark.usefixtures("target")
def test_other_layouts_of_kda_are_refused() -> None:
    packed, s = pack([20, 5], [0, 0], []), kda_nets.TYPICAL
    net = KDA.drawn(s, packed.tokens, packed.pool_size)
    (projected, forget, gate), constants, (conv, state) = net.inputs, net.constants, net.pools
    assert isinstance(constants, KdaConstants)
    plan = plan_prefill(packed.offsets, packed.starts, packed.slots, [], 64, s.kernel, torch.device("cpu"))
    for tensors, pools, fault in [
        ((projected[:, 1:], forget, gate), (conv, state), "is not"),
        ((projected[1:], forget, gate), (conv, state), "is not"),
        ((projected, forget[:, 1:], gate), (conv, state), "is not"),
        ((projected, forget, gate[:, 1:]), (conv, state), "is not"),
        ((projected, forget, gate), (conv[:, 1:], state), "is not"),
        ((projected, forget, gate), (conv, state.mT.contiguous().mT), "is not"),
        ((projected[:, :-1], forget[:, :-128], gate[:, :-128]), (conv, state[:, :5].contiguous()), "do not fit"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.kda_prefill(*tensors, constants, *pools, plan)
