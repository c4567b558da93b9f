"""reference.conv1d_update in Triton: each row's last inputs are read once and shifted in place."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv

# The configurations to choose from, the default first. A thread reads and shifts its own channels only, so that the
# shift in place needs no barrier.
CANDIDATES = [KernelConfig({"BLOCK": block}, warps) for block, warps in [(256, 2), (128, 1), (512, 4), (1024, 4)]]


def conv1d_update(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor) -> Tensor:
    """Compute reference.conv1d_update with SiLU.

    x, float32 or bfloat16, and the pool may be strided in their first dimension.
    Padding rows may share a slot, because neither the slot's contents nor the results of these rows are used.
    """
    rows, (kernel, channels) = len(x), taps.shape
    y = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
    config = _config(channels, kernel, x.device)
    launch(
        _update,
        (cdiv(channels, config.blocks["BLOCK"]), rows),
        *(x, taps, bias, pool, slots, y),
        config=config,
        CHANNELS=channels,
        KERNEL=kernel,
        X_ROW=row_stride(x),
        SLOT=row_stride(pool),
    )
    return y


@by_shape
def _config(channels: int, kernel: int, device: torch.device) -> KernelConfig:
    return config_of("conv1d.update", f"channels={channels} kernel={kernel}", device, *CANDIDATES)


@jit
def _update(
    x_ptr,
    taps_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance BLOCK channels of one row by a token."""
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    history_ptr = pool_ptr + tl.load(slots_ptr + row).to(tl.int64) * SLOT + channels
    # Load everything before the first store, so that the loads are in flight together.
    window = tl.tuple([])
    for k in tl.static_range(KERNEL - 1):
        window += (tl.load(history_ptr + k * CHANNELS, inside, other=0.0),)
    window += (tl.load(x_ptr + row * X_ROW + channels, inside, other=0.0).to(tl.float32),)
    taps, bias = tl.tuple([]), None
    for k in tl.static_range(KERNEL):
        taps += (tl.load(taps_ptr + k * CHANNELS + channels, inside, other=0.0),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channels, inside, other=0.0)
    for k in tl.static_range(1, KERNEL):
        tl.store(history_ptr + (k - 1) * CHANNELS, window[k], inside)
    tl.store(y_ptr + row * CHANNELS + channels, convolved(window, taps, bias, KERNEL), inside)


@jit
def convolved(window, taps, bias, KERNEL: tl.constexpr):
    """Return SiLU of the convolution of KERNEL inputs, the oldest first. bias: None if there is none."""
    return silu(summed(window, taps, bias, KERNEL))


@jit
def summed(window, taps, bias, KERNEL: tl.constexpr):
    """Return the convolution of KERNEL inputs. Each kernel that calls this sums in the same order."""
    y = window[0] * taps[0]
    for k in tl.static_range(1, KERNEL):
        y += window[k] * taps[k]
    if bias is not None:
        y += bias
    return y
