"""Kimi Delta Attention's decode by Triton: equal to the references."""

import torch
from hypothesis import given, settings, strategies as st

from kernels import gpu
from kernels.kda import kda_update, reference, triton_update
from kernels.kda_decode import kda_decode, reference as decoding_reference, triton as decoding
from kernels.state_update.rounding import round_by_chance
from tests.kernels import test_kda
from tests.kernels.gpu.shapes.kda import KDAS
from tests.kernels.kda_nets import (
    BF16,
    F32,
    KdaLayout,
    assert_only_written,
    assert_same_to_rounding,
    drawn,
    slots_of,
)

few = settings(max_examples=6, deadline=None)
SIZES = st.integers(1, 40)
LAYOUTS = st.builds(KdaLayout, heads=st.integers(1, 3), width=SIZES, size=SIZES, kernel=st.integers(2, 5))
SMALL = KdaLayout(heads=2, width=8, size=16, kernel=4)


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
def test_a_row_gets_the_same_alone_and_beside_states_of_nan(layout: KdaLayout) -> None:
    together, slots = drawn(layout, 3, 5), slots_of(3, 5)
    alone = [together.alone(slot) for slot in slots.tolist()]
    expected = together.decode(slots, decoding.kda_decode)
    for row, (slot, net) in enumerate(zip(slots.tolist(), alone, strict=True)):
        assert torch.equal(net.decode(slots, decoding.kda_decode, slice(row, row + 1))[0], expected[row])
        assert torch.equal(net.state_pools[slot, 1], together.state_pools[slot, 1])


def test_states_in_bfloat16_are_those_in_float32_rounded_by_chance() -> None:
    found, slots = drawn(SMALL, 3, 5, states=BF16), slots_of(3, 5)
    exact = found.again(F32)
    assert torch.equal(found.decode(slots, decoding.kda_decode), exact.decode(slots, decoding.kda_decode))
    assert torch.equal(found.state_pools[slots, 1], round_by_chance(exact.state_pools[slots, 1], slots * 1000))


@few
@given(falls=st.sampled_from(test_kda.FALLS), size=SIZES, width=SIZES)
def test_the_bare_update_equals_the_reference(falls: list[float], size: int, width: int) -> None:
    found = test_kda.drawn(3, 6, 3, 2, size, width, falls)
    expected, at = found.over(found.pool.clone()), (torch.tensor([4, 0, 2]), torch.tensor([5, 0, 2**33]))
    f, e = found, expected
    exact = reference.kda_update(e.q, e.k, e.v, e.g, e.beta, e.pool, *at)
    test_kda.assert_close(triton_update.kda_update(f.q, f.k, f.v, f.g, f.beta, f.pool, *at), exact)
    test_kda.assert_close(f.pool, e.pool)


def test_computes_wherever_triton_does() -> None:
    found, slots = drawn(SMALL, 2, 4), slots_of(2, 4)
    expected = found.again()
    with gpu.computes_for("cpu"):
        y = found.decode(slots, kda_decode)
    assert torch.equal(y, expected.decode(slots, decoding.kda_decode))
    rule, at = test_kda.drawn(2, 4), (slots, slots)
    other = rule.over(rule.pool.clone())
    with gpu.computes_for("cpu"):
        updated = kda_update(rule.q, rule.k, rule.v, rule.g, rule.beta, rule.pool, *at)
    exact = triton_update.kda_update(other.q, other.k, other.v, other.g, other.beta, other.pool, *at)
    assert torch.equal(updated, exact) and torch.equal(rule.pool, other.pool)


def test_one_row_takes_the_kernels_of_many() -> None:
    """Else a batch of one row compiles its own."""
    shape, launches = KDAS["odd"], list[gpu.Launch]()
    constants, pools = shape.constants(), shape.pools(9, F32)
    with gpu.watched(launches.append):
        for rows in (5, 1):
            index = torch.empty(rows, dtype=torch.int64, device="meta")
            y = decoding.kda_decode(*shape.projected(rows, BF16), constants, *pools, index, index)
            assert (y.shape, y.dtype) == ((rows, 120), BF16)
    assert len(launches) == 6
    assert [launch.constants for launch in launches[:3]] == [launch.constants for launch in launches[3:]]
