"""Random packed prefills, and the token-by-token recurrence that they are compared with."""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tests.kernels.rounding import FUNCTION, assert_rounded


@dataclass
class Packed:
    """Packed segments, as kernels.prefill.scan.plan_chunks takes them."""

    offsets: list[int]
    starts: list[int]
    slots: list[int]
    checkpoints: list[tuple[int, int, int]]
    pool_size: int

    @property
    def tokens(self) -> int:
        return self.offsets[-1]


def pack(lengths: list[int], starts: list[int], checkpoints: list[tuple[int, int]], seed: int = 0) -> Packed:
    """Pack segments with random slots. checkpoints: (segment, absolute position)."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    size = len(lengths) + len(checkpoints) + 2
    slots = random.Random(seed).sample(range(size), size - 2)
    own, spare = slots[: len(lengths)], slots[len(lengths) :]
    saved = [(*place, slot) for place, slot in zip(checkpoints, spare, strict=True)]
    return Packed(offsets, starts, own, saved, size)


def random_packed(seed: int) -> Packed:
    """Pack 2 to 16 segments of 1 to 300 tokens, fresh or resumed anywhere, with up to 4 checkpoints each."""
    draw = random.Random(seed)
    count = draw.randint(2, 16)
    lengths = [draw.choice([1, 2, 3, draw.randint(1, 60), draw.randint(1, 300)]) for _ in range(count)]
    starts = [draw.choice([0, 64, 256, draw.randint(1, 500)]) for _ in range(count)]
    checkpoints = [
        (
            segment,
            draw.choice([starts[segment] + lengths[segment], starts[segment] + draw.randint(1, lengths[segment])]),
        )
        for segment in range(count)
        for _ in range(draw.randint(0, 4))
    ]
    return pack(lengths, starts, checkpoints, seed)


@dataclass
class Inputs:
    """The arguments of kernels.mamba2.ssd.reference.ssd_prefill."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    pool: Tensor


def random_inputs(tokens: int, slots: int, seed: int, heads: int = 6, groups: int = 2) -> Inputs:
    """Return inputs of head width 4 and state size 8, with weak to almost full decay, and states of magnitude 1."""
    g = torch.Generator().manual_seed(seed)
    return Inputs(
        torch.randn(tokens, heads, 4, generator=g),
        torch.rand(tokens, heads, generator=g) * 0.5,
        -torch.rand(heads, generator=g) * 4,
        torch.randn(tokens, groups, 8, generator=g),
        torch.randn(tokens, groups, 8, generator=g),
        torch.randn(heads, generator=g),
        torch.randn(slots, heads, 4, 8, generator=g),
    )


def recurrence(inputs: Inputs, packed: Packed) -> tuple[Tensor, Tensor]:
    """Compute the outputs [tokens, heads, width] and the final pool in float64, one token after another."""
    pool, y = inputs.pool.double(), torch.empty(inputs.x.shape, dtype=torch.float64)
    per_group = inputs.x.shape[1] // inputs.B.shape[1]
    for segment, slot in enumerate(packed.slots):
        state = pool[slot].clone()
        for token in range(packed.offsets[segment], packed.offsets[segment + 1]):
            x, dt = inputs.x[token].double(), inputs.dt[token].double()
            B = inputs.B[token].double().repeat_interleave(per_group, 0)
            C = inputs.C[token].double().repeat_interleave(per_group, 0)
            state = (dt * inputs.A).exp()[:, None, None] * state + (dt[:, None] * x)[..., None] * B[:, None]
            y[token] = (state * C[:, None]).sum(-1) + inputs.D[:, None] * x
            position = packed.starts[segment] + token - packed.offsets[segment] + 1
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position):
                    pool[target] = state
        pool[slot] = state
    return y, pool


def assert_is_the_recurrence(
    y: Tensor, pool: Tensor, inputs: Inputs, packed: Packed, chunk_size: int = 64, terms: int = 0
) -> None:
    """Compare y and the pool with the recurrence, up to rounding.

    y is a sum over a segment's tokens and a row of the state. Within a chunk, a decay is the exponential of a
    difference of two sums, so its relative error is the sums' rounding error, which grows with their size.

    terms: how many terms (tests/kernels/rounding.py) the computation of dt adds.
    """
    i, length = inputs, max(end - begin for begin, end in pairwise(packed.offsets))
    exponent = float((i.dt * i.A).abs().max()) * min(chunk_size, length)
    terms += length + i.B.shape[2] + 2 * FUNCTION + int(exponent)
    magnitudes = Inputs(i.x.abs(), i.dt, i.A, i.B.abs(), i.C.abs(), i.D.abs(), i.pool.abs())
    for found, exact, size in zip((y, pool), recurrence(i, packed), recurrence(magnitudes, packed), strict=True):
        assert_rounded(found, exact, terms, size)
