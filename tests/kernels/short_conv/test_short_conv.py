"""The gated short convolution in torch and in C++: its definition, and the same bits in prompts and token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.short_conv import ShortConvConstants, native, short_conv_decode, short_conv_prefill
from tests.kernels.conftest import targets
from tests.kernels.installed import installed
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.rounding import assert_rounded

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(3, 150), (1, 5), (5, 129)]
"""Widths of the convolution, and channels: some of them leave parts of blocks and of vectors."""


@dataclass(frozen=True)
class Drawn:
    """Random inputs, and memory whose slots hold two layers' states."""

    projected: Tensor
    constants: ShortConvConstants
    memory: Tensor

    @property
    def pool(self) -> Tensor:
        """The pool of the second layer."""
        return self.memory[:, 1]

    def again(self) -> "Drawn":
        return Drawn(self.projected, self.constants, self.memory.clone())


def drawn(tokens: int, slots: int, shape: tuple[int, int], dtype: torch.dtype = F32, seed: int = 0) -> Drawn:
    """Return inputs that are columns of a wider tensor. Every other seed has a bias."""
    (kernel, channels), g = shape, torch.Generator().manual_seed(seed)
    projected = torch.randn(tokens, 3 * channels + 5, generator=g).to(dtype)[:, 2 : 2 + 3 * channels]
    taps, bias = torch.randn(kernel, channels, generator=g), torch.randn(channels, generator=g)
    memory = torch.randn(slots, 2, kernel - 1, channels, generator=g).to(dtype).float()
    constants = ShortConvConstants(taps, bias if seed % 2 else None)
    return Drawn(projected, constants, memory)


def plan_of(packed: Packed, kernel: int) -> PrefillPlan:
    return plan_prefill(packed.offsets, packed.starts, packed.slots, packed.checkpoints, 64, kernel, CPU)


def defined(inputs: Drawn, packed: Packed, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
    """Return the definition's outputs in float64, and its pool. magnitudes: the outputs' sums of magnitudes instead."""
    B, C, x = inputs.projected.chunk(3, dim=1)
    u, taps, pool = (B * x).double(), inputs.constants.taps.double(), inputs.pool.double()
    bias = torch.zeros(taps.shape[1]).double() if inputs.constants.bias is None else inputs.constants.bias.double()
    y, gate, past = torch.empty_like(u), C.double(), pool.clone()
    if magnitudes:
        u, taps, bias, gate, past = u.abs(), taps.abs(), bias.abs(), gate.abs(), past.abs()
    for segment, slot in enumerate(packed.slots):
        first, end = packed.offsets[segment : segment + 2]
        rows = torch.cat([past[slot], u[first:end]])
        for token in range(first, end):
            y[token] = gate[token] * ((rows[token - first :][: len(taps)] * taps).sum(0) + bias)
        saved = [(at - packed.starts[segment], to) for owner, at, to in packed.checkpoints if owner == segment]
        for length, target in [*saved, (end - first, slot)]:
            pool[target] = rows[length : length + len(taps) - 1]
    return y, pool.float()


def assert_defined(found: Drawn, y: Tensor, before: Drawn, packed: Packed) -> None:
    """Check outputs up to rounding; and the pool bit by bit, as well as the memory of the other layer."""
    exact, pool = defined(before, packed)
    size, _ = defined(before, packed, magnitudes=True)
    assert y.dtype == before.projected.dtype
    assert_rounded(y, exact, len(before.constants.taps) + 2, size)
    assert torch.equal(found.pool, pool)
    assert torch.equal(found.memory[:, 0], before.memory[:, 0])


@pytest.fixture(params=[None, *targets()], ids=lambda target: getattr(target, "name", "torch"), scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with torch, and with this checkout's C++ for the instruction sets that `targets` names."""
    if request.param is None:
        cpp.uninstall()
        yield "torch"
    else:
        with installed(request.param, threads=2):
            yield request.param.name


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_decoding_rows_follow_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    close = pack([4, 9, 1], [60, 3, 0], [(0, 61), (0, 63), (0, 64), (1, 4), (1, 5), (1, 7), (2, 1)])
    for seed, packed in enumerate([close, random_packed(1), random_packed(2)]):
        before = drawn(packed.tokens, packed.pool_size, shape, dtype, seed)
        found = before.again()
        y = short_conv_prefill(found.projected, found.constants, found.pool, plan_of(packed, shape[0]))
        assert_defined(found, y, before, packed)
    rows = Packed([0, 1, 2, 3], [9, 0, 4], [4, 0, 5], [], 6)
    before = drawn(3, 6, shape, dtype)
    found, slots = before.again(), torch.tensor(rows.slots)
    y = short_conv_decode(found.projected, found.constants, found.pool, slots, slots)
    assert_defined(found, y, before, rows)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(dtype: torch.dtype) -> None:
    """In a packed prefill, in pieces, and decoded among other rows: cached states continue as computed ones do."""
    lengths, shape = [70, 3], (3, 150)
    packed = Packed([0, 70, 73], [0, 0], [1, 2], [], 4)
    once, decoded = drawn(73, 4, shape, dtype), drawn(73, 4, shape, dtype)
    exact = short_conv_prefill(once.projected, once.constants, once.pool, plan_of(packed, 3))
    for token in range(70):
        rows = [0, 1] if token < lengths[1] else [0]
        places = torch.tensor([packed.offsets[row] + token for row in rows])
        slots = torch.tensor([packed.slots[row] for row in rows])
        y = short_conv_decode(decoded.projected[places], decoded.constants, decoded.pool, slots, places)
        assert torch.equal(y, exact[places])
    assert torch.equal(decoded.memory, once.memory)

    pieces = drawn(73, 4, shape, dtype)
    for begin, end in ((0, 1), (1, 40), (40, 70)):
        plan = plan_of(Packed([0, end - begin], [begin], [1], [], 4), 3)
        y = short_conv_prefill(pieces.projected[begin:end], pieces.constants, pieces.pool, plan)
        assert torch.equal(y, exact[begin:end])
    assert torch.equal(pieces.pool[1], once.pool[1])


@pytest.mark.usefixtures("native_kernels")
def test_tensors_that_do_not_fit_are_refused() -> None:
    inputs, slots = drawn(3, 6, (3, 10)), torch.tensor([4, 0, 5])
    arguments = (inputs.constants, inputs.pool, slots, slots)
    assert native.takes(inputs.projected, *arguments[:2])
    for projected in (inputs.projected[:, 1:], inputs.projected[:, :29], torch.zeros(30, 3).t()):
        with pytest.raises(ValueError, match="for 10 channels"):
            native.short_conv_decode(projected, *arguments)
    for pool in (inputs.memory[:, 1, 1:], torch.zeros(6, 10, 2).transpose(1, 2)):
        with pytest.raises(ValueError, match="for 10 channels and a width of 3"):
            native.short_conv_decode(inputs.projected, inputs.constants, pool, slots, slots)
    with pytest.raises(ValueError, match="2 tokens for 3 rows"):
        native.short_conv_decode(inputs.projected[:2], *arguments)
    with pytest.raises(ValueError, match="3 tokens for a plan of 2"):
        plan = plan_of(Packed([0, 2], [0], [1], [], 6), 3)
        native.short_conv_prefill(inputs.projected, inputs.constants, inputs.pool, plan)
