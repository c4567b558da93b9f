"""Operations of a gated delta net: everything between the input projection and the output projection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import reference as delta_decode
from baton.kernels.delta_net.prefill import reference as delta_prefill
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of
from scripts.benchmarks.gpu.operations.mamba2 import plans


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net."""

    heads: int = 32
    width: int = 128  # columns of a value
    key_heads: int = 16
    size: int = 128  # columns of a key
    kernel: int = 4  # width of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.key_heads * self.size

    def projected(self, draw: Draw, tokens: int) -> Tensor:
        return draw.normal(tokens, self.inner + self.channels + 2 * self.heads)

    def pools(self, draw: Draw, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the pools of convolution inputs and of states: strided views, because a slot holds two layers."""
        states = draw.normal(slots, 2, self.heads, self.width, self.size, dtype=dtype)[:, 1]
        conv = draw.normal(slots, 2, self.kernel - 1, self.channels, dtype=torch.float32)[:, 1]
        return conv, states

    def constants(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the constants that `named` takes: taps, dt_bias, A, norm."""
        return (
            draw.uniform(-0.5, 0.5, self.kernel, self.channels),
            draw.uniform(-6.0, -2.0, self.heads),
            draw.uniform(-16.0, -1.0, self.heads),
            draw.uniform(0.5, 1.5, self.width),
        )

    def named(self, constants: Sequence[Tensor]) -> DeltaConstants:
        taps, dt_bias, A, norm = constants
        return DeltaConstants(taps, None, dt_bias, A, norm, self.key_heads, 1e-6)


def prefill(draw: Draw, net: DeltaNet, lengths: Sequence[int], states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the whole delta net on packed prompts."""
    from baton.kernels.delta_net.prefill import triton

    here, on_cpu = plans(lengths, net.kernel, draw.device, chunk_size=64)
    projected = net.projected(draw, sum(lengths))
    conv, pool = net.pools(draw, 2 * len(lengths), states)

    def run(projected: Tensor, conv: Tensor, pool: Tensor, *constants: Tensor) -> Sequence[Tensor]:
        return triton.delta_prefill(projected, net.named(constants), conv, pool, here), conv, pool

    def exact(projected: Tensor, conv: Tensor, pool: Tensor, *constants: Tensor) -> Sequence[Tensor]:
        return delta_prefill.delta_prefill(projected, net.named(constants), conv, pool, on_cpu), conv, pool

    moved = bytes_of(projected, pool) + sum(lengths) * net.inner * projected.element_size()
    return Operation(run, exact, (projected, conv, pool, *net.constants(draw)), moved, flops(net, lengths))


def flops(net: DeltaNet, lengths: Sequence[int], chunk: int = 64) -> int:
    """Count the floating-point operations of the matrix products in chunks.

    Each key head needs scores. Each head needs products with the state, products into the state, the solution of a
    triangular system, and the product of the scores with that solution.
    """
    of_token = 2 * net.key_heads * chunk * net.size + net.inner * (3 * net.size + chunk)
    return 2 * of_token * sum(lengths)


def decode(draw: Draw, net: DeltaNet, rows: int, states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the whole delta net with one token per row."""
    from baton.kernels.delta_net.decode import triton

    projected = net.projected(draw, rows)
    conv, pool = net.pools(draw, rows + 1, states)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)

    def run(projected: Tensor, conv: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, *constants = rest
        return triton.delta_decode(projected, net.named(constants), conv, pool, slots, positions), conv, pool

    def exact(projected: Tensor, conv: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, *constants = rest
        return delta_decode.delta_decode(projected, net.named(constants), conv, pool, slots, positions), conv, pool

    inputs = (projected, conv, pool, slots, positions, *net.constants(draw))
    moved = bytes_of(projected) + 2 * rows * bytes_of(conv[0], pool[0]) + bytes_of(projected[:, : net.inner])
    return Operation(run, exact, inputs, moved)
