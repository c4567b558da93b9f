"""One step of Mamba-2's recurrence in Triton: equal to the reference, in place or from slot to slot."""

from dataclasses import dataclass, replace
from math import inf

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.mamba2.state_update import reference, triton
from baton.kernels.runtime.triton import chosen
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.rounding import FUNCTION, SIGMOID, assert_rounded, likely

BF16 = torch.bfloat16
few = settings(max_examples=12, deadline=None)


@dataclass(frozen=True)
class StepShape:
    """The shape of a step."""

    rows: int
    groups: int
    heads: int  # number of heads in each group
    width: int
    size: int


SHAPES = st.builds(
    StepShape,
    rows=st.integers(1, 3),
    groups=st.integers(1, 2),
    heads=st.integers(1, 2),
    width=st.one_of(st.integers(1, 20), st.just(64)),
    size=st.one_of(st.integers(1, 40), st.just(128)),
)


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a step. x, B and C are slices of a convolution's result; dt is a slice of another tensor."""

    convolved: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    memory: Tensor
    slots: Tensor
    shape: StepShape

    @property
    def pool(self) -> Tensor:
        return self.memory[:, 1]

    @property
    def positions(self) -> Tensor:
        return self.slots * 1000 + 2**33

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        sizes = [s.groups * s.heads * s.width, s.groups * s.size, s.groups * s.size]
        x, B, C = self.convolved.split(sizes, 1)
        return x.unflatten(1, (-1, s.width)), B.unflatten(1, (-1, s.size)), C.unflatten(1, (-1, s.size))

    def found(self, **more: object) -> Tensor:
        x, B, C = self.parts()
        return triton.selective_state_update(
            x, self.dt, self.A, B, C, self.D, self.pool, self.slots, self.positions, **more
        )

    def expected(self, dt: Tensor) -> Tensor:
        x, B, C = (part.float() for part in self.parts())
        return reference.selective_state_update(x, dt, self.A, B, C, self.D, self.pool, self.slots, self.positions)

    def again(self, dtype: torch.dtype = torch.float32) -> "StepInputs":
        return replace(self, memory=self.memory.to(dtype, copy=True))


def drawn(s: StepShape, seed: int) -> StepInputs:
    g = torch.Generator().manual_seed(seed)
    heads, slots = s.groups * s.heads, 2 * s.rows + 1
    return StepInputs(
        torch.randn(s.rows, heads * s.width + 2 * s.groups * s.size, generator=g),
        torch.rand(s.rows, 5 + heads, generator=g)[:, 5:],
        -torch.rand(heads, generator=g) * 4,
        torch.randn(heads, generator=g),
        torch.randn(heads, generator=g) * 20,
        torch.randn(slots, 3, heads, s.width, s.size, generator=g),
        torch.randperm(slots, generator=g)[: s.rows],
        s,
    )


def assert_close(found: Tensor, expected: Tensor, size: int, scale: float = 1.0) -> None:
    """Compare sums of `size` products of random signs, of which each is about `scale`, or numbers of the state."""
    assert_rounded(found, expected, size + 2 * SIGMOID + FUNCTION, scale * size**0.5 + expected.abs(), likely)


@few
@given(shape=SHAPES, seed=st.integers(0, 9))
def test_equals_the_reference_and_writes_nothing_else(shape: StepShape, seed: int) -> None:
    found = drawn(shape, seed)
    expected = found.again()
    assert_close(found.found(), expected.expected(found.dt), shape.size)
    assert_close(found.memory, expected.memory, 1)
    expected.pool[found.slots] = found.pool[found.slots]
    assert torch.equal(found.memory, expected.memory)


@few
@given(shape=SHAPES, seed=st.integers(0, 9), limits=st.sampled_from([(0.0, inf), (0.1, 3.0)]))
def test_dt_is_computed_from_the_projection(shape: StepShape, seed: int, limits: tuple[float, float]) -> None:
    found = drawn(shape, seed)
    expected = found.again()
    dt = F.softplus(found.dt + found.dt_bias).clamp(*limits)
    scale = max(1.0, float(dt.max()))
    assert_close(found.found(dt_bias=found.dt_bias, dt_limits=limits), expected.expected(dt), shape.size, scale)
    assert_close(found.memory, expected.memory, 1, scale)


def test_softplus_is_exact_for_tiny_and_large_results_and_nan() -> None:
    dt = torch.cat([torch.linspace(-80, 30, 221), torch.tensor([torch.nan])])
    rows, one = len(dt), torch.ones(len(dt), 1, 1)
    pool = torch.zeros(rows, 1, 1, 1)
    y = triton.selective_state_update(
        *(one, dt[:, None], torch.zeros(1), one, one, torch.zeros(1), pool, torch.arange(rows), torch.arange(rows)),
        dt_bias=torch.zeros(1),
        dt_limits=(0.0, 25.0),
    )
    assert_rounded(y.flatten(), F.softplus(dt.double(), threshold=50).clamp(0, 25), SIGMOID)


@few
@given(shape=SHAPES, seed=st.integers(0, 9), is_rounded=st.booleans())
def test_from_slot_to_slot(shape: StepShape, seed: int, is_rounded: bool) -> None:
    dtype = BF16 if is_rounded else torch.float32
    found, before = drawn(shape, seed).again(dtype), drawn(shape, seed).again(dtype)
    free = [slot for slot in range(2 * shape.rows + 1) if slot not in found.slots]
    targets = torch.tensor(free[: shape.rows])
    expected = before.again(dtype)
    assert torch.equal(found.found(targets=targets), expected.found())
    assert torch.equal(found.pool[targets], expected.pool[found.slots])
    before.pool[targets] = expected.pool[found.slots]
    assert torch.equal(found.memory, before.memory)


@few
@given(shape=SHAPES, seed=st.integers(0, 9))
def test_stochastic_rounding_has_the_same_random_bits(shape: StepShape, seed: int) -> None:
    found = drawn(shape, seed).again(BF16)
    exact = found.again()
    assert torch.equal(found.found(), exact.found())
    assert torch.equal(found.pool[found.slots], round_stochastically(exact.pool[found.slots], found.positions))


@few
@given(shape=SHAPES, seed=st.integers(0, 9))
def test_a_row_gets_the_same_alone_and_among_states_of_nan(shape: StepShape, seed: int) -> None:
    together = drawn(shape, seed)
    expected = together.found()
    for row, slot in enumerate(together.slots.tolist()):
        alone = drawn(shape, seed)
        alone.memory[[other for other in range(len(alone.memory)) if other != slot]] = torch.nan
        rows = slice(row, row + 1)
        y = replace(alone, convolved=alone.convolved[rows], dt=alone.dt[rows], slots=alone.slots[rows]).found()
        assert torch.equal(y[0], expected[row])
        assert torch.equal(alone.pool[slot], together.pool[slot])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_padding_rows_share_a_slot(dtype: torch.dtype) -> None:
    shape = StepShape(5, 1, 2, 8, 16)
    found, alone = drawn(shape, 3).again(dtype), drawn(shape, 3).again(dtype)
    found.slots[2:] = found.slots[4]
    y = found.found()
    alone = replace(alone, convolved=alone.convolved[:2], dt=alone.dt[:2], slots=found.slots[:2])
    assert torch.equal(y[:2], alone.found())
    alone.pool[found.slots[4]] = found.pool[found.slots[4]]
    assert torch.equal(found.memory, alone.memory)


def test_every_configuration_computes_the_same() -> None:
    shape = StepShape(2, 2, 1, 20, 24)
    expected = drawn(shape, 0)
    exact = expected.expected(expected.dt)
    for config in triton.candidates(shape.size):
        found = drawn(shape, 0)
        with chosen(lambda *_, config=config: config):
            assert_close(found.found(), exact, shape.size)
        assert_close(found.memory, expected.memory, 1)


def test_non_contiguous_rows_are_refused() -> None:
    g = drawn(StepShape(2, 1, 2, 4, 8), 0)
    x, B, C = g.parts()
    for wrong_x, wrong_B, pool in [(x.mT, B, g.pool), (x, B[..., ::2], g.pool), (x, B, g.pool.mT)]:
        with pytest.raises(ValueError, match="contiguous"):
            triton.selective_state_update(wrong_x, g.dt, g.A, wrong_B, C, g.D, pool, g.slots, g.slots)


def test_no_rows() -> None:
    g = drawn(StepShape(1, 1, 2, 4, 8), 0)
    none = replace(g, convolved=g.convolved[:0], dt=g.dt[:0], slots=g.slots[:0])
    assert none.found().shape == (0, 2, 4)
