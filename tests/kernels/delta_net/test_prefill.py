"""The gated delta net's prefill, fused in C++, equals its operations' references, run one after another."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.prefill import delta_prefill, native, reference
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.delta_net.delta_nets import (
    BF16,
    DTYPES,
    F32,
    TYPICAL,
    NetLayout,
    assert_only_written,
    assert_same_to_rounding,
    drawn,
    layouts,
)
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.prefills import (
    assert_rounded_where_kept,
    assert_the_same_alone,
    assert_the_same_by_any_threads,
    assert_the_same_in_pieces,
)

many = settings(max_examples=20, deadline=None)


@pytest.mark.usefixtures("target")
@many
@given(layout=layouts(), packed=packs(), seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
def test_equals_the_composed_references_and_writes_nothing_else(
    layout: NetLayout, packed: Packed, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    found = drawn(layout, packed.tokens, packed.pool_size, dtype, seed, states)
    before, expected = found.again(), found.again()
    y, exact = found.prefill(packed, native.delta_prefill), expected.prefill(packed, reference.delta_prefill)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)
    assert_only_written(found, before, [*packed.slots, *(slot for _, _, slot in packed.checkpoints)])


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("seed", range(2))
def test_many_segments_of_the_typical_shape(seed: int) -> None:
    packed = random_packed(seed)
    found = drawn(TYPICAL, packed.tokens, packed.pool_size, F32, seed)
    expected = found.again()
    y, exact = found.prefill(packed, delta_prefill), expected.prefill(packed, reference.delta_prefill)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
@many
@given(layout=layouts(), packed=packs(), dtype=DTYPES, states=DTYPES)
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(
    layout: NetLayout, packed: Packed, dtype: torch.dtype, states: torch.dtype
) -> None:
    net = drawn(layout, packed.tokens, packed.pool_size, dtype, states=states)
    assert_the_same_alone(net, packed, delta_prefill, range(len(packed.slots)))


@pytest.mark.usefixtures("target")
@many
@given(layout=layouts(), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), rest=st.integers(1, 63))
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(
    layout: NetLayout, chunks: list[int], rest: int
) -> None:
    ends = [*accumulate(64 * count for count in chunks)]
    assert_the_same_in_pieces(drawn(layout, ends[-1] + rest, 3), [*ends, ends[-1] + rest], delta_prefill)


@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_threads_change_no_bit(dtype: torch.dtype, states: torch.dtype) -> None:
    packed = pack([130, 1, 70, 33], [0, 64, 7, 300], [(0, 64), (0, 100), (2, 20)])
    net = drawn(TYPICAL, packed.tokens, packed.pool_size, dtype, states=states)
    assert_the_same_by_any_threads(net, packed, delta_prefill)


@pytest.mark.usefixtures("target")
@many
@given(layout=layouts(), packed=packs())
def test_states_in_bfloat16_are_those_in_float32_rounded(layout: NetLayout, packed: Packed) -> None:
    net = drawn(layout, packed.tokens, packed.pool_size, states=BF16)
    assert_rounded_where_kept(net, packed, delta_prefill)


@pytest.mark.usefixtures("target")
def test_strong_decay_ends_in_zero_and_nan_stays_in_its_segment() -> None:
    packed = pack([70, 70], [0, 0], [])
    found = drawn(TYPICAL, packed.tokens, packed.pool_size)
    found.constants.A.fill_(-1e4)
    found.projected[70, TYPICAL.inner + 5] = torch.nan
    expected = found.again()
    y, exact = found.prefill(packed, native.delta_prefill), expected.prefill(packed, reference.delta_prefill)
    assert y[:70].isfinite().all() and y[70].isnan().any()
    torch.testing.assert_close(y[:70], exact[:70], rtol=3e-5, atol=3e-5 * float(exact[:70].abs().max()))
    slot = packed.slots[0]
    torch.testing.assert_close(found.state_pools[slot], expected.state_pools[slot], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("target")
def test_keys_that_repeat_keep_only_the_last_value() -> None:
    """Equal keys without decay, so that each value replaces the last, are the worst case for a chunk's equations."""
    packed = pack([130], [0], [])
    found = drawn(TYPICAL, packed.tokens, packed.pool_size)
    found.constants.A.zero_()
    keys = TYPICAL.keys * TYPICAL.size
    found.projected[:, TYPICAL.inner : TYPICAL.inner + 2 * keys] = found.projected[0, TYPICAL.inner]
    found.projected[:, -2 * TYPICAL.all_heads : -TYPICAL.all_heads] = 100.0
    expected = found.again()
    y, exact = found.prefill(packed, native.delta_prefill), expected.prefill(packed, reference.delta_prefill)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    packed = pack([20, 5], [0, 0], [])
    g = drawn(TYPICAL, packed.tokens, packed.pool_size)
    conv, state = g.conv_pools[:, 1], g.state_pools[:, 1]
    plan = plan_prefill(packed.offsets, packed.starts, packed.slots, [], 64, TYPICAL.kernel, torch.device("cpu"))
    for projected, pools, fault in [
        (g.projected[:, 1:], (conv, state), "is not"),
        (g.projected[1:], (conv, state), "is not"),
        (g.projected, (conv[:, 1:], state), "is not"),
        (g.projected, (conv, state.transpose(2, 3)), "is not"),
        (g.projected[:, : 7 * TYPICAL.width + TYPICAL.channels + 14], (conv, state[:, :7]), "do not fit"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.delta_prefill(projected, g.constants, *pools, plan)
