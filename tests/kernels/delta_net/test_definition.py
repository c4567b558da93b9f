"""The references of both nets between their projections, against their definitions token by token in float64."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.delta_net.kinds import KINDS, Kind, name_of
from tests.kernels.delta_net.nets import BF16, F32, assert_same_to_rounding
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack
from tests.kernels.prefills import output_size, output_terms, state_size, state_terms
from tests.kernels.rounding import assert_rounded, assert_within, likely

many = settings(max_examples=25, deadline=None)
both = pytest.mark.parametrize("kind", KINDS, ids=name_of)


@both
@many
@given(data=st.data(), tokens=st.integers(1, 140), seed=st.integers(0, 9))
def test_a_prefill_equals_the_definition(kind: Kind, data: st.DataObject, tokens: int, seed: int) -> None:
    layout = data.draw(kind.layouts)
    net = kind.drawn(layout, tokens, 3, seed=seed)
    expected, magnified = kind.definition(layout, net, 1)
    y = net.prefill(Packed([0, tokens], [5], [1], [], 3), kind.prefill.dispatched)
    assert_within(y, expected, likely(output_terms(net, y)) * magnified)


@both
@many
@given(data=st.data(), packed=packs(), seed=st.integers(0, 9))
def test_decoding_token_by_token_equals_a_prefill(kind: Kind, data: st.DataObject, packed: Packed, seed: int) -> None:
    """Outputs, states and the convolution's history agree at each segment's end and at every checkpoint."""
    filled = kind.drawn(data.draw(kind.layouts), packed.tokens, packed.pool_size, seed=seed)
    decoded = filled.again()
    y = filled.prefill(packed, kind.prefill.dispatched)
    positions = torch.zeros(packed.tokens, dtype=torch.int64)
    for segment, slot in enumerate(packed.slots):
        first, last = packed.offsets[segment : segment + 2]
        positions[first:last] = torch.arange(last - first) + packed.starts[segment]
        slots = torch.full((packed.tokens,), slot)
        for token in range(first, last):
            row = slice(token, token + 1)
            found = decoded.decode(slots, kind.decode.dispatched, row, positions)
            assert_rounded(found, y[row], output_terms(filled, y), output_size(y[row]), likely)
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, int(positions[token]) + 1):
                    decoded.conv_pools[target] = decoded.conv_pools[slot]
                    decoded.state_pools[target, 1] = decoded.state_pools[slot, 1]
    assert torch.equal(filled.conv_pools[:, 1], decoded.conv_pools[:, 1])
    states = decoded.state_pools[:, 1]
    assert_rounded(filled.state_pools[:, 1], states, state_terms(filled, packed.tokens), state_size(states), likely)


@both
@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_dispatched_form_equals_the_references(kind: Kind, dtype: torch.dtype, states: torch.dtype) -> None:
    packed = pack([90, 1, 40], [0, 64, 7], [(0, 64), (0, 70), (2, 47)])
    found = kind.drawn(kind.small, packed.tokens, packed.pool_size, dtype, 0, states)
    expected = found.again()
    y, exact = found.prefill(packed, kind.prefill.dispatched), expected.prefill(packed, kind.prefill.reference)
    assert y.dtype == dtype and y.shape == (131, 16)
    assert_same_to_rounding(found, y, expected, exact)
    slots, first = torch.tensor(packed.slots), slice(3)
    y = found.decode(slots, kind.decode.dispatched, first)
    exact = expected.decode(slots, kind.decode.reference, first)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)


@both
def test_nan_in_one_request_does_not_reach_others(kind: Kind) -> None:
    packed = pack([70, 33], [0, 0], [])
    healthy = kind.drawn(kind.small, packed.tokens, packed.pool_size)
    poisoned = healthy.again()
    for rows in poisoned.inputs:  # the copies of a net have the same inputs, of which `healthy` reads only 70 rows
        rows[70, :] = torch.nan
    alone = Packed([0, 70], [0], packed.slots[:1], [], packed.pool_size)
    expected = healthy.again().prefill(alone, kind.prefill.dispatched, slice(70))
    y = poisoned.prefill(packed, kind.prefill.dispatched)
    assert torch.equal(y[:70], expected) and y[70:].isnan().any()
    assert poisoned.state_pools[packed.slots[0], 1].isfinite().all()
