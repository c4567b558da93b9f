"""Operations of Kimi Delta Attention (KDA): everything between the input projections and the output projection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import KdaConstants
from baton.kernels.delta_net.decode import reference as kda_decode
from baton.kernels.delta_net.prefill import reference as kda_prefill
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of
from scripts.benchmarks.gpu.operations.mamba2 import plans


@dataclass(frozen=True)
class KdaNet:
    """The sizes of a KDA layer."""

    heads: int = 32
    width: int = 128  # columns of a value
    size: int = 128  # columns of a key
    kernel: int = 4  # width of the convolution

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.size + self.width)

    def projected(self, draw: Draw, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors: queries, keys, values and beta together; the forget gates; the output gates."""
        widths = (self.channels + self.heads, self.heads * self.size, self.heads * self.width)
        return draw.normal(tokens, widths[0]), draw.normal(tokens, widths[1]), draw.normal(tokens, widths[2])

    def pools(self, draw: Draw, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the pools of convolution inputs and of states: strided views, because a slot holds two layers."""
        states = draw.normal(slots, 2, self.heads, self.width, self.size, dtype=dtype)[:, 1]
        conv = draw.normal(slots, 2, self.kernel - 1, self.channels, dtype=torch.float32)[:, 1]
        return conv, states

    def constants(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the constants that `named` takes: taps, dt_bias, A, norm."""
        return (
            draw.uniform(-0.5, 0.5, self.kernel, self.channels),
            draw.uniform(-6.0, -2.0, self.heads * self.size),
            draw.uniform(-16.0, -1.0, self.heads),
            draw.uniform(0.5, 1.5, self.width),
        )

    def named(self, constants: Sequence[Tensor]) -> KdaConstants:
        taps, dt_bias, A, norm = constants
        return KdaConstants(taps, dt_bias, A, norm, 1e-6)


def prefill(draw: Draw, net: KdaNet, lengths: Sequence[int], states: torch.dtype = torch.float32) -> Operation:
    """Build a call of KDA on packed prompts."""
    from baton.kernels.delta_net.prefill import triton

    here, on_cpu = plans(lengths, net.kernel, draw.device, chunk_size=64)
    projected, pools = net.projected(draw, sum(lengths)), net.pools(draw, 2 * len(lengths), states)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, *constants = inputs
        named = net.named(constants)
        return triton.kda_prefill(projected, forget, gate, named, conv, pool, here), conv, pool

    def exact(*inputs: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, *constants = inputs
        named = net.named(constants)
        return kda_prefill.kda_prefill(projected, forget, gate, named, conv, pool, on_cpu), conv, pool

    inputs = (*projected, *pools, *net.constants(draw))
    return Operation(run, exact, inputs, bytes_of(*projected, projected[2], pools[1]), flops(net, lengths))


def flops(net: KdaNet, lengths: Sequence[int], chunk: int = 64) -> int:
    """Count the floating-point operations of the matrix products in chunks.

    Each head needs two kinds of scores, products with the state, products into the state, the solution of a
    triangular system, and the product of the scores with that solution.
    """
    return 2 * net.heads * (2 * chunk * net.size + net.width * (3 * net.size + 2 * chunk)) * sum(lengths)


def decode(draw: Draw, net: KdaNet, rows: int, states: torch.dtype = torch.float32) -> Operation:
    """Build a call of KDA with one token per row."""
    from baton.kernels.delta_net.decode import triton

    projected, (conv, pool) = net.projected(draw, rows), net.pools(draw, rows + 1, states)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, slots, positions, *constants = inputs
        named = net.named(constants)
        return triton.kda_decode(projected, forget, gate, named, conv, pool, slots, positions), conv, pool

    def exact(*inputs: Tensor) -> Sequence[Tensor]:
        projected, forget, gate, conv, pool, slots, positions, *constants = inputs
        named = net.named(constants)
        return kda_decode.kda_decode(projected, forget, gate, named, conv, pool, slots, positions), conv, pool

    inputs = (*projected, conv, pool, slots, positions, *net.constants(draw))
    moved = bytes_of(*projected, projected[2]) + 2 * rows * bytes_of(conv[0], pool[0])
    return Operation(run, exact, inputs, moved)
