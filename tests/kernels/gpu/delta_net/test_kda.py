"""Kimi Delta Attention in Triton equals the references."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.decode import kda_decode, reference as decoding_reference, triton as decoding
from baton.kernels.delta_net.prefill import kda_prefill, reference as prefilling_reference, triton as prefilling
from baton.kernels.delta_net.rule import delta_update, reference, triton, triton_by_channel, triton_update
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net import test_kda
from tests.kernels.delta_net.kda_nets import (
    BF16,
    F32,
    KdaLayout,
    assert_only_written,
    assert_same_to_rounding,
    drawn,
    slots_of,
)
from tests.kernels.gpu.mamba2.test_decode import Operations
from tests.kernels.gpu.shapes.kda import KDAS, KdaShape
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack
from tests.kernels.prefills import (
    assert_nan_stays_in_its_segment,
    assert_rounded_where_kept,
    assert_the_same_alone,
    assert_the_same_in_pieces,
)

few = settings(max_examples=4, deadline=None)
SIZES = st.integers(1, 40)
LAYOUTS = st.builds(KdaLayout, heads=st.integers(1, 3), width=SIZES, size=SIZES, kernel=st.integers(2, 5))
SMALL = KdaLayout(heads=2, width=8, size=16, kernel=4)


@few
@given(layout=LAYOUTS, packed=packs(), seed=st.integers(0, 9))
def test_a_prefill_equals_the_references_and_writes_nothing_else(layout: KdaLayout, packed: Packed, seed: int) -> None:
    found = drawn(layout, packed.tokens, packed.pool_size, seed=seed)
    before, expected = found.again(), found.again()
    y = found.prefill(packed, prefilling.kda_prefill)
    assert_same_to_rounding(found, y, expected, expected.prefill(packed, prefilling_reference.kda_prefill))
    assert_only_written(found, before, [*packed.slots, *(slot for _, _, slot in packed.checkpoints)])


@few
@given(
    packed=packs(),
    falls=st.sampled_from(test_kda.FALLS),
    size=st.one_of(SIZES, st.just(128)),
    width=SIZES,
    seed=st.integers(0, 9),
)
def test_the_bare_scan_equals_the_recurrence_at_every_checkpoint(
    packed: Packed, falls: list[float], size: int, width: int, seed: int
) -> None:
    rule = test_kda.drawn(packed.tokens, packed.pool_size, seed, 2, size, width, falls)
    o, pool = test_kda.recurrence(rule, packed)
    test_kda.assert_close(scan(rule, packed), o)
    test_kda.assert_close(rule.pool, pool)


def scan(rule: test_kda.ChannelRule, packed: Packed) -> torch.Tensor:
    p = packed
    table = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, 1, torch.device("cpu")).table
    return triton.delta_scan(rule.q, rule.k, rule.v, rule.g, rule.beta, rule.pool, table)


def test_every_configuration_scans_the_same() -> None:
    packed = pack([70], [0], [])
    rule = test_kda.drawn(70, packed.pool_size, 1, 1, 70, 40)
    o, pool = test_kda.recurrence(rule, packed)
    related = triton_by_channel.relate_candidates(70, F32) + triton_by_channel.decay_candidates(70)
    scanned = triton_by_channel.scan_candidates(1, 40, 70, F32, 0) + triton_by_channel.scan_candidates(
        1, 40, 70, BF16, 0
    )
    for config in {str(config): config for config in related + scanned}.values():

        def choose(
            kernel: str, shape: str, offered: tuple[gpu.KernelConfig, ...], config: gpu.KernelConfig = config
        ) -> gpu.KernelConfig:
            return config if config.blocks.keys() == offered[0].blocks.keys() else offered[0]

        found = rule.over(rule.pool.clone())
        with gpu.chosen(choose):
            test_kda.assert_close(scan(found, packed), o)
        test_kda.assert_close(found.pool, pool)


@few
@given(packed=packs())
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(packed: Packed) -> None:
    last = len(packed.slots) - 1
    assert_the_same_alone(drawn(SMALL, packed.tokens, packed.pool_size), packed, prefilling.kda_prefill, [last])


def test_a_prompt_cut_at_a_multiple_of_the_chunk_is_the_same_bits() -> None:
    assert_the_same_in_pieces(drawn(SMALL, 150, 3), [64, 150], prefilling.kda_prefill)


def test_a_prefill_rounds_states_where_they_are_stored_and_not_between_chunks() -> None:
    packed = pack([130, 20], [0, 30], [(0, 64), (1, 40)])
    net = drawn(SMALL, packed.tokens, packed.pool_size, states=BF16)
    # Where a GPU rounds to the nearest bfloat16, the interpreter truncates.
    assert_rounded_where_kept(net, packed, prefilling.kda_prefill, tolerance=2**-7)


def test_nan_stays_in_its_segment() -> None:
    packed = pack([70, 70], [0, 0], [])
    found = drawn(SMALL, packed.tokens, packed.pool_size)
    of_second = found.projected[70]
    assert_nan_stays_in_its_segment(found, packed, prefilling.kda_prefill, lambda: of_second.fill_(torch.nan))


@few
@given(layout=LAYOUTS, rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_step_equals_the_references_and_writes_nothing_else(layout: KdaLayout, rows: int, seed: int) -> None:
    found, slots = drawn(layout, rows, rows + 2, seed=seed), slots_of(rows, rows + 2, seed)
    before, expected = found.again(), found.again()
    y = found.decode(slots, decoding.kda_decode)
    assert_same_to_rounding(found, y, expected, expected.decode(slots, decoding_reference.kda_decode))
    assert_only_written(found, before, slots.tolist())


@few
@given(layout=LAYOUTS)
def test_a_row_is_unaffected_by_other_rows_and_by_nan_in_other_slots(layout: KdaLayout) -> None:
    together, slots = drawn(layout, 3, 5), slots_of(3, 5)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, decoding.kda_decode)
    for row, (slot, net) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(net.decode(slots, decoding.kda_decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(net.state_pools[slot, 1], together.state_pools[slot, 1])


def test_bfloat16_states_are_float32_states_stochastically_rounded() -> None:
    found, slots = drawn(SMALL, 3, 5, states=BF16), slots_of(3, 5)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, decoding.kda_decode), exact.decode(slots, decoding.kda_decode))
    assert torch.equal(found.state_pools[slots, 1], round_stochastically(exact.state_pools[slots, 1], slots * 1000))


@few
@given(falls=st.sampled_from(test_kda.FALLS), size=SIZES, width=SIZES)
def test_the_bare_update_equals_the_reference(falls: list[float], size: int, width: int) -> None:
    found = test_kda.drawn(3, 6, 3, 2, size, width, falls)
    expected, at = found.over(found.pool.clone()), (torch.tensor([4, 0, 2]), torch.tensor([5, 0, 2**33]))
    f, e = found, expected
    exact = reference.delta_update(e.q, e.k, e.v, e.g, e.beta, e.pool, *at)
    test_kda.assert_close(triton_update.delta_update(f.q, f.k, f.v, f.g, f.beta, f.pool, *at), exact)
    test_kda.assert_close(f.pool, e.pool)


def test_computes_wherever_triton_does() -> None:
    packed, slots = pack([5, 3], [0, 60], []), slots_of(2, 4)
    found = drawn(SMALL, packed.tokens, packed.pool_size)
    expected = found.again()
    with gpu.computes_for("cpu"):
        y, next_y = found.prefill(packed, kda_prefill), found.decode(slots, kda_decode, slice(2))
    assert torch.equal(y, expected.prefill(packed, prefilling.kda_prefill))
    assert torch.equal(next_y, expected.decode(slots, decoding.kda_decode, slice(2)))
    rule, at = test_kda.drawn(packed.tokens, packed.pool_size), (slots, slots)
    other = rule.over(rule.pool.clone())
    first, exact = rule.rows(slice(2)), other.rows(slice(2))
    with gpu.computes_for("cpu"):
        o = rule.prefill(packed)
        updated = delta_update(first.q, first.k, first.v, first.g, first.beta, rule.pool, *at)
    assert torch.equal(o, scan(other, packed))
    e = exact
    assert torch.equal(updated, triton_update.delta_update(e.q, e.k, e.v, e.g, e.beta, other.pool, *at))
    assert torch.equal(rule.pool, other.pool)


@pytest.mark.parametrize("shape", KDAS.values(), ids=KDAS.keys())
def test_few_launches_and_no_torch_operation_but_allocations(shape: KdaShape) -> None:
    plan, index = shape.plan(), torch.empty(5, dtype=torch.int64, device="meta")
    assert plan.table.chunks == 6  # the chunk table is made on the host, before operations are watched
    prompts, rows = shape.projected(plan.tokens, BF16), shape.projected(5, BF16)
    constants, pools, launches = shape.constants(), shape.pools(9, BF16), list[gpu.Launch]()
    with gpu.watched(launches.append), Operations() as operations:
        y = prefilling.kda_prefill(*prompts, constants, *pools, plan)
        assert len(launches) == 6
        next_y = decoding.kda_decode(*rows, constants, *pools, index, index)
    assert len(launches) == 6 + 3
    assert operations.names == {"aten::empty"}
    assert (y.shape, y.dtype) == ((plan.tokens, shape.heads * shape.width), BF16)
    assert (next_y.shape, next_y.dtype) == ((5, shape.heads * shape.width), BF16)


def test_one_token_uses_the_same_compiled_kernels_as_many() -> None:
    """One token or row uses the kernels compiled for many; otherwise the first one would wait for a compilation."""
    shape, launches = KDAS["odd"], list[gpu.Launch]()
    one = plan_prefill([0, 1], [0], [0], [], 64, shape.kernel, torch.device("meta"))
    constants, pools = shape.constants(), shape.pools(9, F32)
    with gpu.watched(launches.append):
        for plan, rows in ((shape.plan(), 5), (one, 1)):
            index = torch.empty(rows, dtype=torch.int64, device="meta")
            prefilling.kda_prefill(*shape.projected(plan.tokens, BF16), constants, *pools, plan)
            decoding.kda_decode(*shape.projected(rows, BF16), constants, *pools, index, index)
    assert [launch.constants for launch in launches[:9]] == [launch.constants for launch in launches[9:]]
