from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.prefill import mixer_prefill, native, reference
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.prefills import assert_same_to_rounding
from tests.kernels.rounding import lost_exponent

F32, BF16 = torch.float32, torch.bfloat16
LAYERS = 3
many = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Layout:
    """The shape of a mixer.

    heads: number of heads in each group.
    whole_norm: the norm takes one mean square over all groups.
    order: order of norm and gate, a key of NORMS.
    """

    groups: int
    heads: int
    width: int
    state: int
    kernel: int
    chunk_size: int
    bias: bool
    whole_norm: bool
    order: str = "gate first"

    @property
    def inner(self) -> int:
        return self.groups * self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


NORMS = {"gate first": False, "norm first": True, "gate only": None}
LAYOUTS = st.builds(
    Layout,
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.one_of(st.integers(1, 40), st.just(64)),
    state=st.one_of(st.integers(1, 40), st.sampled_from([64, 128])),
    kernel=st.integers(1, 5),
    chunk_size=st.sampled_from([16, 50, 64, 256]),
    bias=st.booleans(),
    whole_norm=st.booleans(),
    order=st.sampled_from(list(NORMS)),
)
DTYPES = st.sampled_from([F32, BF16])
TYPICAL = Layout(groups=1, heads=3, width=64, state=128, kernel=4, chunk_size=256, bias=True, whole_norm=False)


@st.composite
def packs(draw: st.DrawFn) -> Packed:
    """Draw one to four segments, fresh or resumed anywhere, with checkpoints at any position."""
    segments = range(draw(st.integers(1, 4)))
    lengths = [draw(st.one_of(st.integers(1, 5), st.integers(1, 150))) for _ in segments]
    starts = [draw(st.one_of(st.just(0), st.integers(1, 300))) for _ in segments]
    checkpoints = [
        (s, starts[s] + draw(st.integers(1, lengths[s]))) for s in segments for _ in range(draw(st.integers(0, 2)))
    ]
    return pack(lengths, starts, checkpoints, draw(st.integers(0, 9)))


@dataclass(frozen=True)
class Given:
    """A layer's constants and inputs, and pools whose slots hold all layers one after another."""

    layout: Layout
    constants: MixerConstants
    projected: Tensor
    conv_pools: Tensor
    state_pools: Tensor

    def run(self, packed: Packed, form: Callable[..., Tensor] = mixer_prefill, rows: slice = slice(None)) -> Tensor:
        pools = self.conv_pools[:, 1], self.state_pools[:, 1]
        return form(self.projected[rows], self.constants, *pools, planned(self.layout, packed))

    def lost(self) -> float:
        c = self.constants
        dt = softplus(self.projected[:, -len(c.A) :].float() + c.dt_bias).clamp(*c.dt_limits)
        return lost_exponent(dt * c.A, self.layout.chunk_size)

    def again(self, dtype: torch.dtype | None = None) -> "Given":
        states = self.state_pools.clone() if dtype is None else self.state_pools.to(dtype)
        return replace(self, conv_pools=self.conv_pools.clone(), state_pools=states)


def planned(layout: Layout, packed: Packed) -> PrefillPlan:
    p, cpu = packed, torch.device("cpu")
    return plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, layout.chunk_size, layout.kernel, cpu)


def drawn(s: Layout, packed: Packed, dtype: torch.dtype, seed: int = 0, states: torch.dtype = F32) -> Given:
    g = torch.Generator().manual_seed(seed)
    heads = s.groups * s.heads
    constants = MixerConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        conv_bias=torch.randn(s.channels, generator=g) if s.bias else None,
        dt_bias=torch.randn(heads, generator=g) - 1,
        A=-torch.rand(heads, generator=g) * 4,
        D=torch.randn(heads, generator=g),
        norm=None if NORMS[s.order] is None else torch.randn(s.inner, generator=g),
        norm_groups=1 if s.whole_norm else s.groups,
        eps=0.1,
        dt_limits=(0.01, 1.5) if seed % 2 else (0.0, float("inf")),
        norm_before_gate=bool(NORMS[s.order]),
    )
    return Given(
        s,
        constants,
        torch.randn(packed.tokens, s.inner + s.channels + heads, generator=g).to(dtype),
        torch.randn(packed.pool_size, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(packed.pool_size, LAYERS, heads, s.width, s.state, generator=g).to(states),
    )


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, packed=packs(), seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
@example(  # the running sum of a chunk's decays reaches 124, and each of its additions is rounded
    layout=Layout(2, 1, 64, 14, kernel=3, chunk_size=64, bias=True, whole_norm=False),
    packed=Packed([0, 1, 71, 136], [0, 0, 0], [3, 4, 0], [], 5),
    seed=0,
    dtype=F32,
    states=F32,
)
def test_mixer_equals_the_composed_references(
    layout: Layout, packed: Packed, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    found = drawn(layout, packed, dtype, seed, states)
    expected = found.again()
    y, exact = found.run(packed, native.mixer_prefill), expected.run(packed, reference.mixer_prefill)
    assert_same_to_rounding(found, y, expected, exact, found.lost())


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("seed", range(3))
def test_many_segments_of_a_model_with_groups(seed: int) -> None:
    packed = random_packed(seed)
    found = drawn(replace(TYPICAL, groups=2, heads=2), packed, F32, seed)
    expected = found.again()
    y, exact = found.run(packed, native.mixer_prefill), expected.run(packed, reference.mixer_prefill)
    assert_same_to_rounding(found, y, expected, exact, found.lost())


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, packed=packs(), dtype=DTYPES, states=DTYPES)
def test_a_segment_gets_the_same_alone_and_among_states_of_nan(
    layout: Layout, packed: Packed, dtype: torch.dtype, states: torch.dtype
) -> None:
    together = drawn(layout, packed, dtype, states=states)
    expected = together.run(packed)
    for segment, slot in enumerate(packed.slots):
        rows = slice(*packed.offsets[segment : segment + 2])
        checkpoints = [(0, position, target) for owner, position, target in packed.checkpoints if owner == segment]
        own = [slot, *(target for _, _, target in checkpoints)]
        alone = drawn(layout, packed, dtype, states=states)
        others = [other for other in range(packed.pool_size) if other != slot]
        alone.conv_pools[others] = torch.nan
        alone.state_pools[others] = torch.nan
        part = Packed([0, rows.stop - rows.start], [packed.starts[segment]], [slot], checkpoints, packed.pool_size)
        assert torch.equal(alone.run(part, rows=rows), expected[rows])
        assert torch.equal(alone.state_pools[own, 1], together.state_pools[own, 1])
        assert torch.equal(alone.conv_pools[own, 1], together.conv_pools[own, 1])


@pytest.mark.usefixtures("target")
@many
@given(
    layout=LAYOUTS, chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), rest=st.integers(0, 40), dtype=DTYPES
)
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(
    layout: Layout, chunks: list[int], rest: int, dtype: torch.dtype
) -> None:
    layout = replace(layout, chunk_size=50)
    cuts = [0]
    for count in chunks:
        cuts.append(cuts[-1] + 50 * count)
    whole = Packed([0, cuts[-1] + rest], [0], [1], [], 2)
    once = drawn(layout, whole, dtype)
    apart = once.again()
    expected = once.run(whole)
    for begin, end in zip(cuts, [*cuts[1:], cuts[-1] + rest], strict=True):
        if begin < end:
            y = apart.run(Packed([0, end - begin], [begin], [1], [], 2), rows=slice(begin, end))
            assert torch.equal(y, expected[begin:end])
    assert torch.equal(apart.state_pools, once.state_pools)
    assert torch.equal(apart.conv_pools, once.conv_pools)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_threads_change_no_bit(dtype: torch.dtype, states: torch.dtype) -> None:
    packed = random_packed(1)
    first = drawn(TYPICAL, packed, dtype, states=states)
    serial = first.again()
    expected = serial.run(packed)
    for threads in (2, 3):
        found = first.again()
        cpp.use_threads(threads)
        assert torch.equal(found.run(packed), expected)
        assert torch.equal(found.state_pools, serial.state_pools)
        assert torch.equal(found.conv_pools, serial.conv_pools)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, packed=packs())
def test_states_in_bfloat16_are_those_in_float32_rounded(layout: Layout, packed: Packed) -> None:
    rounded = drawn(layout, packed, F32).again(BF16)
    exact = rounded.again(F32)
    assert torch.equal(rounded.run(packed), exact.run(packed))
    assert torch.equal(rounded.state_pools, exact.state_pools.to(BF16))


@pytest.mark.usefixtures("target")
def test_strong_decay_ends_in_zero_and_nan_stays_in_its_segment() -> None:
    packed = pack([70, 70], [0, 0], [])
    found = drawn(TYPICAL, packed, F32)
    found.constants.A.fill_(-1e4)
    found.projected[70, TYPICAL.inner + 5] = torch.nan
    expected = found.again()
    y, exact = found.run(packed, native.mixer_prefill), expected.run(packed, reference.mixer_prefill)
    assert y[:70].isfinite().all() and y[70].isnan().any()
    slot = slice(packed.slots[0], packed.slots[0] + 1)
    assert_same_to_rounding(found, y, expected, exact, tokens=slice(70), slots=slot)


def test_without_a_library_the_torch_path_runs() -> None:
    packed = random_packed(2)
    found = drawn(TYPICAL, packed, F32)
    expected = found.again()
    y, exact = found.run(packed), expected.run(packed, reference.mixer_prefill)
    assert_same_to_rounding(found, y, expected, exact, found.lost())


def test_the_table_lists_chunks_in_the_order_of_their_tokens() -> None:
    packed = Packed([0, 20, 70], [60, 0], [4, 7], [(1, 40, 2), (1, 40, 3), (0, 80, 5)], 8)
    table = planned(replace(TYPICAL, chunk_size=64), packed).table
    assert table.starts.tolist() == [0, 4, 20, 60, 70]
    assert table.slots.tolist() == [4, 7]
    assert table.first.tolist() == [0, 2, 4]
    assert table.saves.tolist() == [0, 0, 1, 3, 3]
    assert table.saved.tolist() == [5, 2, 3]


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    packed = pack([20, 5], [0, 0], [])
    g = drawn(TYPICAL, packed, F32)
    conv, state, plan = g.conv_pools[:, 1], g.state_pools[:, 1], planned(TYPICAL, packed)
    for projected, pools in [
        (g.projected[:, 1:], (conv, state)),
        (g.projected[1:], (conv, state)),
        (g.projected, (conv[:, 1:], state)),
        (g.projected, (conv, state.transpose(2, 3))),
    ]:
        with pytest.raises(ValueError, match="is not"):
            native.mixer_prefill(projected, g.constants, *pools, plan)
