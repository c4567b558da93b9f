"""Tile sizes of triton.py: how many tokens, positions and columns a program instance holds at a time."""

import torch
from torch import Tensor

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of
from baton.kernels.runtime.triton.limits import KIB, shared_memory
from baton.kernels.runtime.triton.sizes import next_power_of_2

# Queries and keys of up to WIDEST columns are held as one tile; wider ones are multiplied in pieces of PIECE columns.
WIDEST, PIECE = 256, 64
# Maximum value accumulators of a program if keys are wider than WIDEST; other programs compute further value columns.
SUMS = 32768
# Maximum numbers that one program of the combine kernel reads: parts of a decoding row times columns.
COMBINED = 16384
# Shared memory of GPUs whose tensor cores read their operands from it (Hopper and later GPUs of data centres). On other
# GPUs the operands take registers, and larger tiles spill.
LARGE = 227 * KIB


def block(width: int) -> int:
    """Return the width of a tile that holds `width` columns: a power of two, at least 16."""
    return max(16, int(next_power_of_2(width)))


def columns_of_keys(width: int) -> int:
    """Return how many columns of queries and keys a program holds at a time."""
    return PIECE if width > WIDEST else block(width)


def columns_of_values(group: int, width: int, value_width: int) -> int:
    """Return how many columns of values a program accumulates.

    group: query heads that share a key head.
    """
    return block(value_width) if width <= WIDEST else min(block(value_width), SUMS // max(64, block(group)))


def combined_columns(parts: int, value_width: int) -> int:
    """Return how many columns of a decoding row one program combines from its parts."""
    return min(block(value_width), COMBINED // parts)


def prefill_config(query: Tensor, value_pages: Tensor) -> KernelConfig:
    """Return the block sizes of the prefill kernel for these shapes on this device."""
    shared = shared_memory(query.device)
    return _config("prefill", query.shape[1:], value_pages.shape[1:], query.dtype, query.device, shared)


def decode_config(query: Tensor, value_pages: Tensor) -> KernelConfig:
    """Return the block sizes of the decode kernel for these shapes on this device."""
    shared = shared_memory(query.device)
    return _config("decode", query.shape[1:], value_pages.shape[1:], query.dtype, query.device, shared)


@by_shape
def _config(
    kernel: str, query: tuple[int, ...], page: tuple[int, ...], dtype: torch.dtype, device: torch.device, shared: int
) -> KernelConfig:
    """Return the configuration of a kernel, "prefill" or "decode", for these shapes on this device.

    query: heads and width. page: page size, key heads and width of values.
    """
    (heads, width), (page_size, kv_heads, value_width) = query, page
    group = heads // kv_heads
    if kernel == "prefill":
        candidates = prefill_candidates(group, width, dtype, shared)
    else:
        candidates = decode_candidates(group, width, dtype)
    widths = f"width={width}" if value_width == width else f"width={width} values={value_width}"
    shape = f"heads={heads} kv_heads={kv_heads} {widths} page={page_size} {str(dtype).removeprefix('torch.')}"
    return config_of(f"attention.paged.{kernel}", shape, device, *candidates)


def prefill_candidates(group: int, width: int, dtype: torch.dtype, shared: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first. None spills registers with bfloat16 (docs/gpu.md).

    A program holds BLOCK_M rows of queries (tokens times the `group` heads that share keys), and reads BLOCK_N
    positions at a time.

    shared: bytes of shared memory that a program may use.
    """
    least = next_power_of_2(group)
    if dtype == torch.float32:  # No tensor cores: a large tile fits into registers only with many threads.
        sizes = [(16, 16, 4, 2), (32, 16, 8, 1), (32, 16, 8, 2), (32, 32, 8, 2)]
        sizes = [(m, n, min(16, max(warps, least // 4)), stages) for m, n, warps, stages in sizes]
    elif width <= 64:
        sizes = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)]
    elif width <= 128 and shared >= LARGE:
        sizes = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)]
    elif width <= 128:
        sizes = [(128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3), (64, 32, 4, 2)]
    elif width > WIDEST:  # The latents of MLA, which all heads share.
        sizes = [(64, 32, 8, 3), (64, 32, 8, 4), (64, 16, 8, 3), (32, 64, 8, 3), (32, 32, 8, 3)]
    elif shared >= LARGE:
        sizes = [(128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3)]
    else:
        sizes = [(64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2)]
    return [KernelConfig({"BLOCK_M": max(m, least), "BLOCK_N": n}, warps, stages) for m, n, warps, stages in sizes]


def decode_candidates(group: int, width: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first; the default fits every GPU.

    A program reads BLOCK_N positions at a time. BLOCK_N is a divisor of 128, so that blocks do not cross parts.
    """
    exact = dtype == torch.float32
    tile_bytes = 8192 if exact or group > 16 else 16384
    most = max(16, min(64, tile_bytes // (next_power_of_2(width) * dtype.itemsize)))
    sizes = [(most, 4, 3), (most // 2, 4, 4), (most // 2, 2, 4), (most, 2, 3), (most, 4, 4), (most, 8, 2)]
    if width > WIDEST:
        sizes = [(16, 8, 3), (16, 16, 2), (32, 8, 2)] if exact else [(32, 8, 4), (32, 8, 3), (64, 8, 3), (16, 8, 4)]
    elif exact:
        sizes = [(most, 8, 2), (most, 8, 3), (most, 4, 3), (most, 4, 2)]
    return [KernelConfig({"BLOCK_N": max(16, n)}, warps, stages) for n, warps, stages in sizes]
