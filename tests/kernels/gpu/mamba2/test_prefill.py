"""The mixer of a prefill in Triton, in five launches: equal to its operations' references."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.mamba2.prefill import mixer_prefill, reference, triton
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton as gpu
from tests.kernels.gpu.mamba2.test_decode import Operations
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape
from tests.kernels.gpu.shapes.mixer_prefill import plan_of
from tests.kernels.mamba2.test_prefill import BF16, F32, LAYERS, NORMS, Layout, drawn, packs
from tests.kernels.packing import Packed, pack
from tests.kernels.prefills import assert_same_to_rounding
from tests.kernels.rounding import assert_within, unit

few = settings(max_examples=6, deadline=None)
SMALL = Layout(groups=1, heads=2, width=8, state=16, kernel=4, chunk_size=64, bias=True, whole_norm=False)
LAYOUTS = st.builds(
    Layout,
    groups=st.integers(1, 2),
    heads=st.integers(1, 2),
    width=st.one_of(st.integers(1, 16), st.just(40)),
    state=st.one_of(st.integers(1, 40), st.just(128)),
    kernel=st.integers(2, 5),
    chunk_size=st.sampled_from([50, 64, 256]),
    bias=st.booleans(),
    whole_norm=st.booleans(),
    order=st.sampled_from(list(NORMS)),
)


@few
@given(layout=LAYOUTS, packed=packs(), seed=st.integers(0, 9))
def test_equals_the_composed_references_and_writes_nothing_else(layout: Layout, packed: Packed, seed: int) -> None:
    found = drawn(layout, packed, F32, seed)
    expected = found.again()
    y, exact = found.run(packed, triton.mixer_prefill), expected.run(packed, reference.mixer_prefill)
    assert_same_to_rounding(found, y, expected, exact, found.lost())
    others = [layer for layer in range(LAYERS) if layer != 1]
    written = [*packed.slots, *(slot for _, _, slot in packed.checkpoints)]
    spare = [slot for slot in range(packed.pool_size) if slot not in written]
    for pool, before in [(found.conv_pools, expected.conv_pools), (found.state_pools, expected.state_pools)]:
        assert torch.equal(pool[:, others], before[:, others])
        assert torch.equal(pool[spare], before[spare])


@few
@given(packed=packs())
def test_a_segment_gets_the_same_alone_and_among_states_of_nan(packed: Packed) -> None:
    together = drawn(SMALL, packed, F32)
    expected = together.run(packed, triton.mixer_prefill)
    segment = len(packed.slots) - 1
    slot, rows = packed.slots[segment], slice(packed.offsets[segment], None)
    checkpoints = [(0, position, target) for owner, position, target in packed.checkpoints if owner == segment]
    own = [slot, *(target for _, _, target in checkpoints)]
    alone = drawn(SMALL, packed, F32)
    others = [other for other in range(packed.pool_size) if other != slot]
    alone.conv_pools[others] = torch.nan
    alone.state_pools[others] = torch.nan
    part = Packed([0, packed.tokens - rows.start], [packed.starts[segment]], [slot], checkpoints, packed.pool_size)
    assert torch.equal(alone.run(part, triton.mixer_prefill, rows), expected[rows])
    assert torch.equal(alone.state_pools[own, 1], together.state_pools[own, 1])
    assert torch.equal(alone.conv_pools[own, 1], together.conv_pools[own, 1])


@pytest.mark.parametrize("cuts", [[64, 128, 150], [64, 150], [128, 150]])
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(cuts: list[int]) -> None:
    whole = Packed([0, 150], [0], [1], [(0, 64, 2)], 3)
    once = drawn(SMALL, whole, F32)
    apart = once.again()
    expected, begin = once.run(whole, triton.mixer_prefill), 0
    for end in cuts:
        checkpoints = [(0, 64, 2)] if begin < 64 else []
        part = Packed([0, end - begin], [begin], [1], checkpoints, 3)
        assert torch.equal(apart.run(part, triton.mixer_prefill, slice(begin, end)), expected[begin:end])
        begin = end
    assert torch.equal(apart.state_pools, once.state_pools)
    assert torch.equal(apart.conv_pools, once.conv_pools)


def test_bfloat16_states_are_rounded_when_written_and_not_between_chunks() -> None:
    packed = pack([130, 20], [0, 30], [(0, 64), (1, 40)])
    rounded = drawn(SMALL, packed, F32).again(BF16)
    exact = rounded.again(F32)
    assert torch.equal(rounded.run(packed, triton.mixer_prefill), exact.run(packed, triton.mixer_prefill))
    # The interpreter truncates to bfloat16, a GPU rounds.
    states = exact.state_pools
    assert_within(rounded.state_pools, states, 2 * unit(BF16) * states.double().abs())


def test_nan_stays_in_its_segment() -> None:
    packed = pack([70, 70], [0, 0], [])
    found = drawn(SMALL, packed, F32)
    expected = found.again()
    exact = expected.run(packed, triton.mixer_prefill)
    for column in (SMALL.inner + 1, SMALL.inner + SMALL.channels):
        found.projected[70, column] = torch.nan
    y = found.run(packed, triton.mixer_prefill)
    assert y[70:].isnan().any() and found.state_pools[packed.slots[1], 1].isnan().any()
    assert torch.equal(y[:70], exact[:70])
    assert torch.equal(found.state_pools[packed.slots[0]], expected.state_pools[packed.slots[0]])


def test_triton_is_used_where_it_computes() -> None:
    packed = pack([5, 3], [0, 60], [])
    found = drawn(SMALL, packed, F32)
    expected = found.again()
    with gpu.computes_for("cpu"):
        y = found.run(packed, mixer_prefill)
    assert torch.equal(y, expected.run(packed, triton.mixer_prefill))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_five_launches_and_only_allocations_by_torch(shape: MixerShape) -> None:
    plan, launches = plan_of(shape), list[gpu.Launch]()
    projected, constants, pools = shape.projected(plan.tokens, BF16), shape.constants(), shape.pools(9, BF16)
    assert plan.table.chunks == 6  # the chunk table is made before launches are counted
    with gpu.watched(launches.append), Operations() as operations:
        y = triton.mixer_prefill(projected, constants, *pools, plan)
    assert len(launches) == 5
    assert operations.names == {"aten::empty"}
    assert (y.shape, y.dtype) == ((plan.tokens, shape.inner), BF16)


def test_one_token_takes_the_kernels_of_many() -> None:
    """One token launches the kernels of many; otherwise a prompt of one token would compile kernels of its own."""
    shape, launches = SHAPES["odd"], list[gpu.Launch]()
    one = plan_prefill([0, 1], [0], [0], [], 64, shape.kernel, torch.device("meta"))
    with gpu.watched(launches.append):
        for plan in (plan_of(shape), one):
            pools = shape.pools(9, F32)
            triton.mixer_prefill(shape.projected(plan.tokens, BF16), shape.constants(), *pools, plan)
    assert [launch.constants for launch in launches[:5]] == [launch.constants for launch in launches[5:]]
