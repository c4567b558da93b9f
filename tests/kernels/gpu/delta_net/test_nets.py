"""Both nets between their projections in Triton: equal to their operations' references, run one after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.decode import triton as decoding
from baton.kernels.delta_net.prefill import triton as prefilling
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net import delta_nets, kda_nets, kinds
from tests.kernels.delta_net.nets import BF16, F32, assert_only_written, assert_same_to_rounding, slots_of
from tests.kernels.gpu.mamba2.test_decode import Operations
from tests.kernels.gpu.shapes.delta import NETS, NetShape
from tests.kernels.gpu.shapes.kda import KDAS, KdaShape
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack
from tests.kernels.prefills import (
    assert_nan_stays_in_its_segment,
    assert_rounded_where_kept,
    assert_the_same_alone,
    assert_the_same_in_pieces,
)

few = settings(max_examples=3, deadline=None)


@dataclass(frozen=True)
class TritonKind:
    """One of the two nets, with its Triton forms."""

    kind: kinds.Kind
    layouts: st.SearchStrategy[delta_nets.NetLayout] | st.SearchStrategy[kda_nets.KdaLayout]  # small ones
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    shapes: Mapping[str, NetShape | KdaShape]
    prefill_launches: int


GATED = TritonKind(
    kinds.GATED,
    delta_nets.layouts(most_keys=2, most_heads=2),
    prefilling.delta_prefill,
    decoding.delta_decode,
    NETS,
    prefill_launches=5,
)
KDA = TritonKind(
    kinds.KDA,
    kda_nets.layouts(most_heads=3, typical=40),
    prefilling.kda_prefill,
    decoding.kda_decode,
    KDAS,
    prefill_launches=6,
)
DECODE_LAUNCHES = 3
both = pytest.mark.parametrize("net", [GATED, KDA], ids=["gated", "kda"])
every_shape = pytest.mark.parametrize(
    ("net", "shape"), [(net, shape) for net in (GATED, KDA) for shape in net.shapes.values()]
)


@both
@few
@given(data=st.data(), packed=packs(), seed=st.integers(0, 9))
def test_a_prefill_equals_the_references_and_writes_nothing_else(
    net: TritonKind, data: st.DataObject, packed: Packed, seed: int
) -> None:
    found = net.kind.drawn(data.draw(net.layouts), packed.tokens, packed.pool_size, seed=seed)
    before, expected = found.again(), found.again()
    y = found.prefill(packed, net.prefill)
    assert_same_to_rounding(found, y, expected, expected.prefill(packed, net.kind.prefill.reference))
    assert_only_written(found, before, [*packed.slots, *(slot for _, _, slot in packed.checkpoints)])


@both
@few
@given(data=st.data(), rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_step_equals_the_references_and_writes_nothing_else(
    net: TritonKind, data: st.DataObject, rows: int, seed: int
) -> None:
    found, slots = net.kind.drawn(data.draw(net.layouts), rows, rows + 2, seed=seed), slots_of(rows, rows + 2, seed)
    before, expected = found.again(), found.again()
    y = found.decode(slots, net.decode)
    assert_same_to_rounding(found, y, expected, expected.decode(slots, net.kind.decode.reference))
    assert_only_written(found, before, slots.tolist())


@both
@few
@given(packed=packs())
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(net: TritonKind, packed: Packed) -> None:
    last, kind = len(packed.slots) - 1, net.kind
    assert_the_same_alone(kind.drawn(kind.small, packed.tokens, packed.pool_size), packed, net.prefill, [last])


@both
@few
@given(data=st.data())
def test_a_row_is_unaffected_by_other_rows_and_by_nan_in_other_slots(net: TritonKind, data: st.DataObject) -> None:
    together, slots = net.kind.drawn(data.draw(net.layouts), 3, 5), slots_of(3, 5)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, net.decode)
    for row, (slot, other) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(other.decode(slots, net.decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(other.state_pools[slot, 1], together.state_pools[slot, 1])


@both
def test_a_prompt_cut_at_a_multiple_of_the_chunk_is_the_same_bits(net: TritonKind) -> None:
    assert_the_same_in_pieces(net.kind.drawn(net.kind.small, 150, 3), [64, 150], net.prefill)


@both
def test_bfloat16_states_are_float32_states_stochastically_rounded(net: TritonKind) -> None:
    found, slots = net.kind.drawn(net.kind.small, 3, 5, states=BF16), slots_of(3, 5)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, net.decode), exact.decode(slots, net.decode))
    assert torch.equal(found.state_pools[slots, 1], round_stochastically(exact.state_pools[slots, 1], slots * 1000))


@both
def test_a_prefill_rounds_states_where_they_are_stored_and_not_between_chunks(net: TritonKind) -> None:
    packed = pack([130, 20], [0, 30], [(0, 64), (1, 40)])
    found = net.kind.drawn(net.kind.small, packed.tokens, packed.pool_size, states=BF16)
    # Where a GPU rounds to the nearest bfloat16, the interpreter truncates.
    assert_rounded_where_kept(found, packed, net.prefill, truncates=True)


@both
def test_nan_stays_in_its_segment(net: TritonKind) -> None:
    packed = pack([70, 70], [0, 0], [])
    found = net.kind.drawn(net.kind.small, packed.tokens, packed.pool_size)
    of_second = found.projected[70]
    assert_nan_stays_in_its_segment(found, packed, net.prefill, lambda: of_second.fill_(torch.nan))


@both
def test_computes_wherever_triton_does(net: TritonKind) -> None:
    packed, slots, kind = pack([5, 3], [0, 60], []), slots_of(2, 4), net.kind
    found = kind.drawn(kind.small, packed.tokens, packed.pool_size)
    expected = found.again()
    with gpu.computes_for("cpu"):
        y = found.prefill(packed, kind.prefill.dispatched)
        next_y = found.decode(slots, kind.decode.dispatched, slice(2))
    assert torch.equal(y, expected.prefill(packed, net.prefill))
    assert torch.equal(next_y, expected.decode(slots, net.decode, slice(2)))


def inputs_of(shape: NetShape | KdaShape, rows: int) -> tuple[Tensor, ...]:
    inputs = shape.projected(rows, BF16)
    return (inputs,) if isinstance(inputs, Tensor) else inputs


@every_shape
def test_few_launches_and_no_torch_operation_but_allocations(net: TritonKind, shape: NetShape | KdaShape) -> None:
    plan, index = shape.plan(), torch.empty(5, dtype=torch.int64, device="meta")
    assert plan.table.chunks == 6  # the chunk table is made on the host, before operations are watched
    prompts, rows = inputs_of(shape, plan.tokens), inputs_of(shape, 5)
    constants, pools, launches = shape.constants(), shape.pools(9, BF16), list[gpu.Launch]()
    with gpu.watched(launches.append), Operations() as operations:
        y = net.prefill(*prompts, constants, *pools, plan)
        assert len(launches) == net.prefill_launches
        next_y = net.decode(*rows, constants, *pools, index, index)
    assert len(launches) == net.prefill_launches + DECODE_LAUNCHES
    assert operations.names == {"aten::empty"}
    assert (y.shape, y.dtype) == ((plan.tokens, shape.heads * shape.width), BF16)
    assert (next_y.shape, next_y.dtype) == ((5, shape.heads * shape.width), BF16)


@both
def test_one_token_uses_the_same_compiled_kernels_as_many(net: TritonKind) -> None:
    """One token or row uses the kernels compiled for many; otherwise the first one would wait for a compilation."""
    shape, launches = net.shapes["odd"], list[gpu.Launch]()
    one = plan_prefill([0, 1], [0], [0], [], 64, shape.kernel, torch.device("meta"))
    constants, pools = shape.constants(), shape.pools(9, F32)
    with gpu.watched(launches.append):
        for plan, rows in ((shape.plan(), 5), (one, 1)):
            index = torch.empty(rows, dtype=torch.int64, device="meta")
            net.prefill(*inputs_of(shape, plan.tokens), constants, *pools, plan)
            net.decode(*inputs_of(shape, rows), constants, *pools, index, index)
    half = net.prefill_launches + DECODE_LAUNCHES
    assert [launch.constants for launch in launches[:half]] == [launch.constants for launch in launches[half:]]
