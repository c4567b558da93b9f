"""Tile sizes of triton.py."""

import torch
from torch import Tensor

from baton.kernels.attention.paged.tiles import LARGE
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of
from baton.kernels.runtime.triton.limits import LEAST, shared_memory


def prefill_config(query: Tensor, value_weight: Tensor) -> KernelConfig:
    """Return the block sizes for these shapes on this device."""
    (heads, width), value_width = query.shape[1:], value_weight.shape[1]
    return _config(heads, width, value_width, query.dtype, query.device, shared_memory(query.device))


@by_shape
def _config(
    heads: int, width: int, value_width: int, dtype: torch.dtype, device: torch.device, shared: int
) -> KernelConfig:
    shape = f"heads={heads} width={width} values={value_width} {str(dtype).removeprefix('torch.')}"
    return config_of("attention.latents.by_heads", shape, device, *candidates(dtype, shared))


def candidates(dtype: torch.dtype, shared: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first. None spills registers with bfloat16 (docs/gpu.md).

    A program holds BLOCK_M tokens of one head, and reads BLOCK_N positions at a time.

    shared: bytes of shared memory that a program may use.
    """
    if dtype == torch.float32:  # No tensor cores: a large tile fits into registers only with many threads.
        sizes = [(16, 16, 4, 2), (32, 16, 8, 1), (32, 16, 8, 2), (32, 32, 8, 2)]
    elif shared >= LARGE:
        sizes = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2)]
    elif shared >= LEAST:
        sizes = [(64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2)]
    else:
        sizes = [(64, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 1)]
    return [KernelConfig({"BLOCK_M": m, "BLOCK_N": n}, warps, stages) for m, n, warps, stages in sizes]
