"""Kimi Delta Attention between its projections, a token a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kda_constants import KdaConstants
from kernels.kda_decode import reference
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of


@dataclass(frozen=True)
class KdaNet:
    heads: int = 32
    width: int = 128
    size: int = 128
    kernel: int = 4

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.size + self.width)

    def pools(self, draw: Draw, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of the convolution and of states, each slot's part of two layers behind one another."""
        conv, state = (self.kernel - 1) * self.channels, self.heads * self.width * self.size
        states = draw.normal(slots, 2, state, dtype=dtype)[:, 1].unflatten(1, (self.heads, self.width, self.size))
        return draw.normal(slots, 2, conv, dtype=torch.float32)[:, 1].unflatten(1, (self.kernel - 1, -1)), states

    def constants(self, draw: Draw) -> tuple[Tensor, ...]:
        """As in KdaConstants."""
        return (
            draw.uniform(-0.5, 0.5, self.kernel, self.channels),
            draw.uniform(-6.0, -2.0, self.heads * self.size),
            draw.uniform(-16.0, -1.0, self.heads),
            draw.uniform(0.5, 1.5, self.width),
        )


def decode(draw: Draw, net: KdaNet, rows: int, states: torch.dtype = torch.float32) -> Operation:
    from kernels.kda_decode import triton

    projected = draw.normal(rows, net.channels + net.heads)
    forget, gate = draw.normal(rows, net.heads * net.size), draw.normal(rows, net.heads * net.width)
    conv, pool = net.pools(draw, rows + 1, states)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)

    def run(*given: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, slots, positions, *constants = given
        named = KdaConstants(*constants, eps=1e-6)
        return triton.kda_decode(projected, forget, gate, named, conv, pool, slots, positions), conv, pool

    def exact(*given: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, slots, positions, *constants = given
        named = KdaConstants(*constants, eps=1e-6)
        return reference.kda_decode(projected, forget, gate, named, conv, pool, slots, positions), conv, pool

    inputs = (projected, forget, gate, conv, pool, slots, positions, *net.constants(draw))
    moved = bytes_of(projected, forget, gate, gate) + 2 * rows * bytes_of(conv[0], pool[0])
    return Operation(run, exact, inputs, moved)
