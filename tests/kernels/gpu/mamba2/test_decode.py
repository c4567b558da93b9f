"""The mixer of decoding rows in Triton, in three launches: equal to its operations' references."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.mamba2.decode import reference, triton
from baton.kernels.mamba2.state_update import triton_replay
from baton.kernels.mamba2.state_update.replay import InputRing
from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape
from tests.kernels.mamba2.test_decode import BF16, F32, LAYERS, NORMS, Layout, drawn
from tests.kernels.prefills import assert_same_to_rounding

few = settings(max_examples=8, deadline=None)
LAYOUTS = st.builds(
    Layout,
    groups=st.integers(1, 2),
    heads=st.integers(1, 2),
    width=st.one_of(st.integers(1, 20), st.just(64)),
    state=st.one_of(st.integers(1, 40), st.just(128)),
    kernel=st.integers(1, 5),
    rows=st.integers(1, 3),
    bias=st.booleans(),
    whole_norm=st.booleans(),
    order=st.sampled_from(list(NORMS)),
)


@few
@given(layout=LAYOUTS, seed=st.integers(0, 9))
def test_equals_the_composed_references_and_writes_nothing_else(layout: Layout, seed: int) -> None:
    found = drawn(layout, F32, seed)
    expected = found.again()
    y, exact = found.run(triton.mixer_decode), expected.run(reference.mixer_decode)
    assert_same_to_rounding(found, y, expected, exact)
    others = [layer for layer in range(LAYERS) if layer != 1]
    spare = [slot for slot in range(layout.rows + 2) if slot not in found.slots]
    for pool, before in [(found.conv_pools, expected.conv_pools), (found.state_pools, expected.state_pools)]:
        assert torch.equal(pool[:, others], before[:, others])
        assert torch.equal(pool[spare], before[spare])


@few
@given(layout=LAYOUTS)
def test_bfloat16_states_are_stochastically_rounded_float32_states(layout: Layout) -> None:
    found = drawn(layout, F32, 1, BF16)
    exact = found.again(F32)
    assert torch.equal(found.run(triton.mixer_decode), exact.run(triton.mixer_decode))
    states = exact.state_pools[exact.slots, 1]
    assert torch.equal(found.state_pools[found.slots, 1], round_stochastically(states, found.slots * 1000))


@few
@given(layout=LAYOUTS)
def test_a_row_gets_the_same_alone(layout: Layout) -> None:
    together, alone = drawn(layout, F32), drawn(layout, F32)
    expected = together.run(triton.mixer_decode)
    for row in range(layout.rows):
        assert torch.equal(alone.run(triton.mixer_decode, slice(row, row + 1))[0], expected[row])
    assert torch.equal(alone.state_pools, together.state_pools)
    assert torch.equal(alone.conv_pools, together.conv_pools)


class Operations(TorchDispatchMode):
    """A recorder of the names of torch operations that run, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_three_launches_and_only_allocations_by_torch(shape: MixerShape) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    projected, constants, pools = shape.projected(5, BF16), shape.constants(), shape.pools(9, BF16)
    launches: list[gpu.Launch] = []
    with gpu.watched(launches.append), Operations() as operations:
        y = triton.mixer_decode(projected, constants, *pools, index, index)
    assert len(launches) == 3
    assert operations.names == {"aten::empty"}
    assert (y.shape, y.dtype) == ((5, shape.inner), BF16)


def test_one_row_takes_the_kernels_of_many() -> None:
    """One row launches the kernels of many rows; otherwise a batch of one would compile kernels of its own."""
    layout, launches = Layout(2, 2, 16, 16, 4, 3, True, False), []
    with gpu.watched(launches.append):
        drawn(layout, F32).run(triton.mixer_decode)
        drawn(layout, F32).run(triton.mixer_decode, slice(1))
    assert [launch.constants for launch in launches[:3]] == [launch.constants for launch in launches[3:]]


def test_with_a_ring_of_inputs_the_bits_are_the_same() -> None:
    layout = Layout(2, 1, 16, 16, 4, 2, True, False)
    found, expected = drawn(layout, F32), drawn(layout, F32)
    ring = InputRing(torch.empty(3, 4, 2, 16), torch.empty(3, 4, 2), torch.empty(3, 4, 2, 16))
    places, positions = torch.tensor([2, 0]), torch.tensor([3, 9])
    starts = positions.clone()
    update = partial(triton_replay.replay_state_update, ring=ring, places=places, starts=starts)
    pools = [(mixer.conv_pools[:, 1], mixer.state_pools[:, 1]) for mixer in (found, expected)]
    for seed in range(6):
        projected = drawn(layout, F32, seed).projected
        y = triton.mixer_decode(projected, found.constants, *pools[0], found.slots, positions, update)
        assert torch.equal(y, triton.mixer_decode(projected, found.constants, *pools[1], found.slots, positions))
        positions += 1
    triton_replay.flush(pools[0][1], found.slots, positions, ring, places, starts)
    assert torch.equal(found.state_pools, expected.state_pools)
    assert torch.equal(found.conv_pools, expected.conv_pools)
