"""The gated delta net between its projections in Triton: equal to its operations' references, run one after another."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.decode import delta_decode, reference as decoding_reference, triton as decoding
from baton.kernels.delta_net.prefill import delta_prefill, reference as prefilling_reference, triton as prefilling
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net.delta_nets import (
    BF16,
    F32,
    NetLayout,
    assert_only_written,
    assert_same_to_rounding,
    drawn,
    layouts,
    slots_of,
)
from tests.kernels.gpu.mamba2.test_decode import Operations
from tests.kernels.gpu.shapes.delta import NETS, NetShape
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack
from tests.kernels.prefills import (
    assert_nan_stays_in_its_segment,
    assert_rounded_where_kept,
    assert_the_same_alone,
    assert_the_same_in_pieces,
)

few = settings(max_examples=5, deadline=None)
LAYOUTS = layouts(most_keys=2, most_heads=2)
SMALL = NetLayout(keys=1, heads=2, width=8, size=16, kernel=4, bias=True)


@few
@given(layout=LAYOUTS, packed=packs(), seed=st.integers(0, 9))
def test_a_prefill_equals_the_references_and_writes_nothing_else(layout: NetLayout, packed: Packed, seed: int) -> None:
    found = drawn(layout, packed.tokens, packed.pool_size, seed=seed)
    before, expected = found.again(), found.again()
    y = found.prefill(packed, prefilling.delta_prefill)
    assert_same_to_rounding(found, y, expected, expected.prefill(packed, prefilling_reference.delta_prefill))
    assert_only_written(found, before, [*packed.slots, *(slot for _, _, slot in packed.checkpoints)])


@few
@given(layout=LAYOUTS, rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_step_equals_the_references_and_writes_nothing_else(layout: NetLayout, rows: int, seed: int) -> None:
    found, slots = drawn(layout, rows, rows + 2, seed=seed), slots_of(rows, rows + 2, seed)
    before, expected = found.again(), found.again()
    y = found.decode(slots, decoding.delta_decode)
    assert_same_to_rounding(found, y, expected, expected.decode(slots, decoding_reference.delta_decode))
    assert_only_written(found, before, slots.tolist())


@few
@given(packed=packs())
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(packed: Packed) -> None:
    last = len(packed.slots) - 1
    assert_the_same_alone(drawn(SMALL, packed.tokens, packed.pool_size), packed, prefilling.delta_prefill, [last])


@few
@given(layout=LAYOUTS)
def test_a_row_is_unaffected_by_other_rows_and_by_nan_in_other_slots(layout: NetLayout) -> None:
    together, slots = drawn(layout, 3, 5), slots_of(3, 5)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, decoding.delta_decode)
    for row, (slot, net) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(net.decode(slots, decoding.delta_decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(net.state_pools[slot, 1], together.state_pools[slot, 1])


def test_a_prompt_cut_at_a_multiple_of_the_chunk_is_the_same_bits() -> None:
    assert_the_same_in_pieces(drawn(SMALL, 150, 3), [64, 150], prefilling.delta_prefill)


def test_bfloat16_states_are_float32_states_stochastically_rounded() -> None:
    found, slots = drawn(SMALL, 3, 5, states=BF16), slots_of(3, 5)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, decoding.delta_decode), exact.decode(slots, decoding.delta_decode))
    assert torch.equal(found.state_pools[slots, 1], round_stochastically(exact.state_pools[slots, 1], slots * 1000))


def test_a_prefill_rounds_states_where_they_are_stored_and_not_between_chunks() -> None:
    packed = pack([130, 20], [0, 30], [(0, 64), (1, 40)])
    net = drawn(SMALL, packed.tokens, packed.pool_size, states=BF16)
    # Where a GPU rounds to the nearest bfloat16, the interpreter truncates.
    assert_rounded_where_kept(net, packed, prefilling.delta_prefill, tolerance=2**-7)


def test_nan_stays_in_its_segment() -> None:
    packed = pack([70, 70], [0, 0], [])
    found = drawn(SMALL, packed.tokens, packed.pool_size)
    of_second = found.projected[70, SMALL.inner :]
    assert_nan_stays_in_its_segment(found, packed, prefilling.delta_prefill, lambda: of_second.fill_(torch.nan))


def test_computes_wherever_triton_does() -> None:
    packed, slots = pack([5, 3], [0, 60], []), slots_of(2, 4)
    found = drawn(SMALL, packed.tokens, packed.pool_size)
    expected = found.again()
    with triton.computes_for("cpu"):
        y, next_y = found.prefill(packed, delta_prefill), found.decode(slots, delta_decode, slice(2))
    assert torch.equal(y, expected.prefill(packed, prefilling.delta_prefill))
    assert torch.equal(next_y, expected.decode(slots, decoding.delta_decode, slice(2)))


@pytest.mark.parametrize("shape", NETS.values(), ids=NETS.keys())
def test_few_launches_and_no_torch_operation_but_allocations(shape: NetShape) -> None:
    plan, index = shape.plan(), torch.empty(5, dtype=torch.int64, device="meta")
    assert plan.table.chunks == 6  # the chunk table is made on the host, before operations are watched
    prompts, rows = shape.projected(plan.tokens, BF16), shape.projected(5, BF16)
    constants, pools, launches = shape.constants(), shape.pools(9, BF16), list[triton.Launch]()
    with triton.watched(launches.append), Operations() as operations:
        y = prefilling.delta_prefill(prompts, constants, *pools, plan)
        assert len(launches) == 5
        next_y = decoding.delta_decode(rows, constants, *pools, index, index)
    assert len(launches) == 5 + 3
    assert operations.names == {"aten::empty"}
    assert (y.shape, y.dtype) == ((plan.tokens, shape.inner), BF16)
    assert (next_y.shape, next_y.dtype) == ((5, shape.inner), BF16)


def test_one_token_uses_the_same_compiled_kernels_as_many() -> None:
    """One token or row uses the kernels compiled for many; otherwise the first one would wait for a compilation."""
    shape, launches = NETS["odd"], list[triton.Launch]()
    one = plan_prefill([0, 1], [0], [0], [], 64, shape.kernel, torch.device("meta"))
    constants, pools = shape.constants(), shape.pools(9, F32)
    with triton.watched(launches.append):
        for plan, rows in ((shape.plan(), 5), (one, 1)):
            index = torch.empty(rows, dtype=torch.int64, device="meta")
            prefilling.delta_prefill(shape.projected(plan.tokens, BF16), constants, *pools, plan)
            decoding.delta_decode(shape.projected(rows, BF16), constants, *pools, index, index)
    assert [launch.constants for launch in launches[:8]] == [launch.constants for launch in launches[8:]]
