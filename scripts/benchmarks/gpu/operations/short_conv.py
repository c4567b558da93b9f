"""Gated short convolutions, alone and with drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.short_conv import reference
from baton.kernels.short_conv.constants import ShortConvConstants
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of
from scripts.benchmarks.gpu.operations.drafts import FED, REPLAYED, RING


@dataclass(frozen=True)
class Convolution:
    """Sizes of a gated short convolution; by default those of LFM2-1.2B."""

    channels: int = 2048
    kernel: int = 3

    def pool(self, draw: Draw, slots: int) -> Tensor:
        """Return the pool of the last inputs: a strided view, because a slot holds two layers."""
        return draw.normal(slots, 2, self.kernel - 1, self.channels, dtype=torch.float32)[:, 1]

    def constants(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return taps and bias."""
        return draw.uniform(-0.5, 0.5, self.kernel, self.channels), draw.uniform(-0.5, 0.5, self.channels)


def decode(draw: Draw, convolution: Convolution, rows: int) -> Operation:
    """Build a call with one token per row."""
    from baton.kernels.short_conv import triton

    projected, pool = draw.normal(rows, 3 * convolution.channels), convolution.pool(draw, rows + 1)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)

    def run(projected: Tensor, pool: Tensor, slots: Tensor, positions: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return triton.short_conv_decode(projected, ShortConvConstants(*rest), pool, slots, positions), pool

    def exact(projected: Tensor, pool: Tensor, slots: Tensor, positions: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return reference.short_conv_decode(projected, ShortConvConstants(*rest), pool, slots, positions), pool

    inputs = (projected, pool, slots, positions, *convolution.constants(draw))
    moved = bytes_of(projected) + 2 * rows * bytes_of(pool[0]) + bytes_of(projected[:, : convolution.channels])
    return Operation(run, exact, inputs, moved)


def decode_with_drafts(draw: Draw, convolution: Convolution, rows: int) -> Operation:
    """Build a call in which each row replays REPLAYED tokens, and feeds FED, the first no draft."""
    from baton.kernels.short_conv import triton

    projected, pool = draw.normal(rows * FED, 3 * convolution.channels), convolution.pool(draw, rows + 1)
    ring, bounds = draw.normal(rows, RING, convolution.channels), torch.arange(rows + 1, device=draw.device)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows) + REPLAYED
    where = (slots, positions, bounds * (REPLAYED + FED), bounds * FED, draw.order(rows))

    def drafts_of(begins: Tensor, offsets: Tensor, rings: Tensor) -> Drafts:
        return Drafts(begins, offsets, rings, rows * (REPLAYED + FED), FED - 1)

    def run(projected: Tensor, pool: Tensor, ring: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, begins, offsets, rings, *constants = rest
        at = slots, positions, drafts_of(begins, offsets, rings), ring
        return triton.short_conv_decode_drafts(projected, ShortConvConstants(*constants), pool, *at), pool, ring

    def exact(projected: Tensor, pool: Tensor, ring: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, begins, offsets, rings, *constants = rest
        parts, columns = reference.gate_and_inputs(projected), (slice(0), slice(None))
        at = (pool,), slots, positions, drafts_of(begins, offsets, rings), ring
        return decode_drafts(reference.gated_update, parts, columns, ShortConvConstants(*constants), *at), pool, ring

    in_rings = rows * (REPLAYED + FED - 1) * bytes_of(ring[0, 0])
    moved = bytes_of(projected) * 4 // 3 + in_rings + 2 * rows * bytes_of(pool[0])
    return Operation(run, exact, (projected, pool, ring, *where, *convolution.constants(draw)), moved)
