from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import mixer_decode, native, reference
from baton.kernels.runtime import cpp
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.prefills import assert_same_to_rounding, output_size, output_terms
from tests.kernels.rounding import assert_rounded, likely

F32, BF16 = torch.float32, torch.bfloat16
LAYERS = 3
many = settings(max_examples=50, deadline=None)


@dataclass(frozen=True)
class Layout:
    """The shape of a mixer."""

    groups: int
    heads: int  # number of heads in each group
    width: int
    state: int
    kernel: int
    rows: int
    bias: bool
    whole_norm: bool  # the norm takes one mean square over all groups
    order: str = "gate first"  # order of norm and gate, a key of NORMS

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
    heads=st.integers(1, 4),
    width=st.one_of(st.integers(1, 40), st.just(64)),
    state=st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 256])),
    kernel=st.integers(1, 5),
    rows=st.integers(1, 6),
    bias=st.booleans(),
    whole_norm=st.booleans(),
    order=st.sampled_from(list(NORMS)),
)
DTYPES = st.sampled_from([F32, BF16])
TYPICAL = Layout(groups=1, heads=24, width=64, state=128, kernel=4, rows=5, bias=True, whole_norm=False)


@dataclass(frozen=True)
class Given:
    """A layer's constants and inputs, and pools whose slots hold all layers one after another, so slots are strided."""

    constants: MixerConstants
    projected: Tensor
    conv_pools: Tensor
    state_pools: Tensor
    slots: Tensor

    def run(self, form: Callable[..., Tensor] = mixer_decode, rows: slice = slice(None)) -> Tensor:
        pools = self.conv_pools[:, 1], self.state_pools[:, 1]
        return form(self.projected[rows], self.constants, *pools, self.slots[rows], self.slots[rows] * 1000)

    def again(self, dtype: torch.dtype | None = None) -> "Given":
        states = self.state_pools.clone() if dtype is None else self.state_pools.to(dtype)
        return replace(self, conv_pools=self.conv_pools.clone(), state_pools=states)


def drawn(s: Layout, dtype: torch.dtype, seed: int = 0, states: torch.dtype = F32) -> Given:
    g = torch.Generator().manual_seed(seed)
    heads, slots = s.groups * s.heads, s.rows + 2
    constants = MixerConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g),
        conv_bias=torch.randn(s.channels, generator=g) if s.bias else None,
        dt_bias=torch.randn(heads, generator=g),
        A=-torch.rand(heads, generator=g) * 4,
        D=torch.randn(heads, generator=g),
        norm=None if NORMS[s.order] is None else torch.randn(s.inner, generator=g),
        norm_groups=1 if s.whole_norm else s.groups,
        eps=0.1,
        dt_limits=(0.01, 1.5) if seed % 2 else (0.0, float("inf")),
        norm_before_gate=bool(NORMS[s.order]),
    )
    return Given(
        constants,
        torch.randn(s.rows, s.inner + s.channels + heads, generator=g).to(dtype),
        torch.randn(slots, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, LAYERS, heads, s.width, s.state, generator=g).to(states),
        torch.randperm(slots, generator=g)[: s.rows],
    )


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, seed=st.integers(0, 9), dtype=DTYPES, states=DTYPES)
def test_mixer_equals_the_composed_references(
    layout: Layout, seed: int, dtype: torch.dtype, states: torch.dtype
) -> None:
    found = drawn(layout, dtype, seed, states)
    expected = found.again()
    y, exact = found.run(native.mixer_decode), expected.run(reference.mixer_decode)
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)
    others = [layer for layer in range(LAYERS) if layer != 1]
    spare = [slot for slot in range(layout.rows + 2) if slot not in found.slots]
    for pool, before in [(found.conv_pools, expected.conv_pools), (found.state_pools, expected.state_pools)]:
        assert torch.equal(pool[:, others], before[:, others])
        assert torch.equal(pool[spare], before[spare])


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_typical_shape(dtype: torch.dtype) -> None:
    found = drawn(TYPICAL, dtype)
    expected = found.again()
    y, exact = found.run(), expected.run(reference.mixer_decode)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, dtype=DTYPES, states=DTYPES)
def test_a_row_gets_the_same_alone_and_among_states_of_nan(
    layout: Layout, dtype: torch.dtype, states: torch.dtype
) -> None:
    together = drawn(layout, dtype, states=states)
    expected = together.run()
    for row, slot in enumerate(together.slots):
        alone = drawn(layout, dtype, states=states)
        others = [other for other in range(layout.rows + 2) if other != slot]
        alone.conv_pools[others] = torch.nan
        alone.state_pools[others] = torch.nan
        assert torch.equal(alone.run(rows=slice(row, row + 1))[0], expected[row])
        assert torch.equal(alone.state_pools[slot], together.state_pools[slot])
        assert torch.equal(alone.conv_pools[slot], together.conv_pools[slot])


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_threads_change_no_bit(dtype: torch.dtype, states: torch.dtype, rows: int) -> None:
    first = drawn(replace(TYPICAL, rows=rows), dtype, states=states)
    serial = first.again()
    expected = serial.run()
    for threads in (2, 3):
        found = first.again()
        cpp.use_threads(threads)
        assert torch.equal(found.run(), expected)
        assert torch.equal(found.state_pools, serial.state_pools)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, seed=st.integers(0, 9))
def test_bfloat16_states_are_stochastically_rounded_float32_states(layout: Layout, seed: int) -> None:
    found = drawn(layout, F32, seed, BF16)
    exact = found.again(F32)
    y, exact_y = found.run(), exact.run()
    assert_rounded(y, exact_y, output_terms(found, y), output_size(exact_y), likely)
    states = exact.state_pools[exact.slots, 1]
    assert torch.equal(found.state_pools[found.slots, 1], round_stochastically(states, found.slots * 1000))


@pytest.mark.usefixtures("target")
def test_nan_with_all_bits_set_stays_nan_in_bfloat16_states() -> None:
    """Such a NaN reaches the states through the convolution; a random integer added to its bits would make it -0."""
    layout = replace(TYPICAL, width=65, state=130)  # odd, so that whole vectors and single numbers are rounded
    mixer = drawn(layout, F32, states=BF16)
    mixer.conv_pools.view(torch.int32).fill_(0x7FFFFFFF)
    mixer.run()
    assert mixer.state_pools[mixer.slots, 1].isnan().all()


def test_without_a_library_the_torch_path_runs() -> None:
    found = drawn(TYPICAL, F32)
    expected = found.again()
    y, exact = found.run(), expected.run(reference.mixer_decode)
    assert_same_to_rounding(found, y, expected, exact)


@pytest.mark.usefixtures("target")
def test_denormal_states_are_flushed_to_zero() -> None:
    mixer = drawn(TYPICAL, F32)
    mixer.state_pools.fill_(1e-39)
    mixer.projected[:, TYPICAL.inner : 2 * TYPICAL.inner] = 0
    mixer.conv_pools.zero_()
    before = torch.tensor(1e-39) + 0
    mixer.run()
    slots = mixer.state_pools[mixer.slots, 1]
    assert not ((slots != 0) & (slots.abs() < torch.finfo(F32).tiny)).any()
    assert torch.tensor(1e-39) + 0 == before


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    g = drawn(replace(TYPICAL, rows=2), F32)
    conv, state = g.conv_pools[:, 1], g.state_pools[:, 1]
    for projected, pools, slots, fault in [
        (g.projected[:, 1:], (conv, state), g.slots, "a row of projected is"),
        (g.projected.t().contiguous().t(), (conv, state), g.slots, "a row of projected is"),
        (g.projected, (conv[:, 1:], state), g.slots, "a row of the convolution's pool is"),
        (g.projected, (conv, state[:, :23]), g.slots, "channels do not fit"),
        (g.projected, (conv, state.transpose(2, 3).contiguous().transpose(2, 3)), g.slots, "a row of the pool of st"),
        (g.projected, (conv, state), g.slots.int(), "int64"),
        (g.projected, (conv, state), g.slots[:1], "int64"),
    ]:
        with pytest.raises(ValueError, match=fault):
            native.mixer_decode(projected, g.constants, *pools, slots, g.slots)
