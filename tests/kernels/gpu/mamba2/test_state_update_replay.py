"""Mamba-2's recurrence with a ring of inputs: the same bits as without a ring, and an exact state after each flush."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.mamba2.state_update import reference, replay, triton, triton_replay
from baton.kernels.mamba2.state_update.replay import InputRing
from tests.kernels.gpu.mamba2.test_state_update import StepShape, assert_close
from tests.kernels.rounding import assert_within

FORMS = pytest.mark.parametrize(
    ("plain", "ringed"), [(reference, replay), (triton, triton_replay)], ids=["reference", "triton"]
)
SHAPES = st.builds(
    StepShape,
    rows=st.integers(1, 2),
    groups=st.integers(1, 2),
    heads=st.integers(1, 2),
    width=st.integers(1, 20),
    size=st.one_of(st.integers(1, 20), st.just(128)),
)
few = settings(max_examples=8, deadline=None)


@dataclass
class Decoding:
    """Rows that decode with a ring of inputs, and for comparison a second pool that is written at each token."""

    s: StepShape
    g: torch.Generator
    memory: Tensor
    exact: Tensor  # the pool that is written at each token
    ring: InputRing
    A: Tensor
    D: Tensor
    slots: Tensor
    places: Tensor
    starts: Tensor
    positions: Tensor

    @property
    def pool(self) -> Tensor:
        return self.memory[:, 1]

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        s, g = self.s, self.g
        heads, groups = s.groups * s.heads, s.groups
        x = torch.randn(s.rows, heads, s.width, generator=g)
        dt = torch.rand(s.rows, heads, generator=g)
        B, C = torch.randn(2, s.rows, groups, s.size, generator=g)
        return x, dt, self.A, B, C, self.D

    def step(self, plain: ModuleType, ringed: ModuleType) -> tuple[Tensor, Tensor]:
        """Return y computed with a ring of inputs, and y computed without one."""
        inputs = self.inputs()
        at = self.ring, self.places, self.starts
        y = ringed.replay_state_update(*inputs, self.pool, self.slots, self.positions, *at)
        exact = plain.selective_state_update(*inputs, self.exact, self.slots, self.positions)
        self.positions += 1
        return y, exact

    def flush(self, ringed: ModuleType, targets: Tensor | None = None) -> None:
        ringed.flush(self.pool, self.slots, self.positions, self.ring, self.places, self.starts, targets)


def drawn(s: StepShape, window: int, seed: int) -> Decoding:
    """Return rows with a ring full of NaN, so that a read of an entry that was not written is noticed."""
    g = torch.Generator().manual_seed(seed)
    heads, slots = s.groups * s.heads, 2 * s.rows + 1
    memory = torch.randn(slots, 2, heads, s.width, s.size, generator=g)
    rings = torch.full((slots, 2, window, heads * s.width + heads + s.groups * s.size), torch.nan)
    parts = rings[:, 0].flatten(1).split([window * heads * s.width, window * heads, window * s.groups * s.size], 1)
    starts = torch.randint(0, 3 * window, (s.rows,), generator=g)
    return Decoding(
        s,
        g,
        memory,
        memory[:, 1].clone(),
        InputRing(
            parts[0].unflatten(1, (window, heads, s.width)),
            parts[1].unflatten(1, (window, heads)),
            parts[2].unflatten(1, (window, s.groups, s.size)),
        ),
        -torch.rand(heads, generator=g) * 4,
        torch.randn(heads, generator=g),
        torch.randperm(slots, generator=g)[: s.rows],
        torch.randperm(slots, generator=g)[: s.rows],
        starts,
        starts.clone(),
    )


@FORMS
@few
@given(shape=SHAPES, window=st.sampled_from([1, 2, 4, 8, 16]), steps=st.integers(0, 12), seed=st.integers(0, 9))
def test_the_bits_of_the_plain_form_at_every_token_and_flush(
    plain: ModuleType, ringed: ModuleType, shape: StepShape, window: int, steps: int, seed: int
) -> None:
    d = drawn(shape, window, seed)
    for _ in range(steps):
        before = d.pool.clone()
        y, exact = d.step(plain, ringed)
        assert torch.equal(y, exact)
        for row, slot in enumerate(d.slots.tolist()):
            written = d.positions[row] % window == 0
            assert torch.equal(d.pool[slot], d.exact[slot] if written else before[slot])
    free = torch.tensor([slot for slot in range(2 * shape.rows + 1) if slot not in d.slots][: shape.rows])
    others, before = d.memory[:, 0].clone(), d.pool.clone()
    d.flush(ringed, free)
    assert torch.equal(d.pool[free], d.exact[d.slots])
    before[free] = d.pool[free]
    assert torch.equal(d.pool, before)
    d.flush(ringed)
    assert torch.equal(d.pool[d.slots], d.exact[d.slots])
    assert torch.equal(d.memory[:, 0], others)


@FORMS
def test_a_row_continues_after_its_own_slot_was_flushed(plain: ModuleType, ringed: ModuleType) -> None:
    d = drawn(StepShape(2, 1, 2, 8, 16), 8, 1)
    for step in range(18):
        assert torch.equal(*d.step(plain, ringed))
        if step % 5 == 2:
            d.flush(ringed)
            assert torch.equal(d.pool[d.slots], d.exact[d.slots])
            d.starts = d.positions.clone()


@FORMS
def test_one_row_gets_the_same_alone(plain: ModuleType, ringed: ModuleType) -> None:
    together, alone = (drawn(StepShape(3, 2, 1, 8, 16), 4, 2) for _ in range(2))
    for _ in range(6):
        inputs = together.inputs()
        x, dt, A, B, C, D = inputs
        at = together.ring, together.places, together.starts
        y = ringed.replay_state_update(*inputs, together.pool, together.slots, together.positions, *at)
        for row in range(3):
            one = slice(row, row + 1)
            of_one = alone.slots[one], together.positions[one], alone.ring, alone.places[one], alone.starts[one]
            found = ringed.replay_state_update(x[one], dt[one], A, B[one], C[one], D, alone.pool, *of_one)
            assert torch.equal(found[0], y[row])
        together.positions += 1
    assert torch.equal(together.memory, alone.memory)
    assert_within(together.ring.B, alone.ring.B, 0.0)


def test_padding_rows_share_a_slot_and_a_place_at_position_0() -> None:
    d = drawn(StepShape(5, 1, 1, 8, 16), 8, 3)
    d.slots[2:], d.places[2:], d.starts[2:], d.positions[2:] = d.slots[4], d.places[4], 0, 0
    for _ in range(10):
        y, exact = d.step(triton, triton_replay)
        d.positions[2:] = 0
        assert torch.equal(y[:2], exact[:2])
    d.flush(triton_replay)
    assert torch.equal(d.pool[d.slots[:2]], d.exact[d.slots[:2]])


def test_dt_is_computed_from_the_projection() -> None:
    d = drawn(StepShape(2, 1, 3, 8, 16), 4, 4)
    x, dt, A, B, C, D = d.inputs()
    bias, at = torch.randn(3), (d.slots, d.positions, d.ring, d.places, d.starts)
    limits = {"dt_bias": bias, "dt_limits": (0.6, 1.1)}
    y = triton_replay.replay_state_update(x, dt, A, B, C, D, d.pool, *at, **limits)
    assert torch.equal(y, triton.selective_state_update(x, dt, A, B, C, D, d.exact, d.slots, d.slots, **limits))
    again = drawn(d.s, 4, 4)
    at = again.slots, again.positions, again.ring, again.places, again.starts
    exact = replay.replay_state_update(x, dt, A, B, C, D, again.pool, *at, **limits)
    assert_close(y, exact, d.s.size)
    d.positions += 1
    again.positions += 1
    d.flush(triton_replay)
    again.flush(replay)
    assert_close(d.pool, again.pool, 1)


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 8), (torch.float32, 6)])
def test_unsupported_dtypes_and_windows_are_refused(dtype: torch.dtype, window: int) -> None:
    d = drawn(StepShape(1, 1, 1, 4, 8), window, 0)
    d.memory = d.memory.to(dtype)
    with pytest.raises(ValueError, match="not float32 and a power of two"):
        d.flush(triton_replay)
