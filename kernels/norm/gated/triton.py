"""The same as reference.py, by Triton: each group is read once."""

import torch
import triton
from torch import Tensor
from triton import language as tl

from baton.kernels.norm.gated.reference import Activation
from baton.kernels.runtime.triton import KernelConfig, config_of, launch
from baton.kernels.runtime.triton.functions import sigmoid, silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: Activation = "silu",
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See reference.gated_norm. Rows of x and gate, float32 or bfloat16, may lie apart. dtype: of the result.

    weight: that of every channel, or [channels / groups], of each group alike.
    """
    rows, channels = x.shape
    width = channels // groups
    kept = x.dtype if weight is None else weight.dtype
    y = torch.empty(rows, channels, dtype=dtype or kept, device=x.device)
    config = config_of("norm.gated.gated_norm", f"width={width}", x.device, *candidates(width))
    launch(
        _gated_norm,
        (triton.cdiv(rows * groups, config.blocks["PARTS"]),),
        *(x, gate, weight, y, rows * groups, eps),
        config=config,
        GROUPS=groups,
        WIDTH=width,
        X_ROW=row_stride(x),
        GATE_ROW=row_stride(gate),
        WEIGHTS=0 if weight is None or len(weight) == width else width,
        NORM_BEFORE_GATE=norm_before_gate,
        IS_SILU=activation == "silu",
        BLOCK=triton.next_power_of_2(width),
    )
    return y


def candidates(width: int) -> list[KernelConfig]:
    """The first is the default: some 8 elements a thread and no program of less than a thousand."""
    block = triton.next_power_of_2(width)
    parts = max(1, 1024 // block)
    default = min(8, max(1, parts * block // 256))
    others = [warps for warps in (1, 2, 4, 8, 16) if warps != default and 4 <= parts * block // (32 * warps) <= 64]
    return [KernelConfig({"PARTS": parts}, warps) for warps in [default, *others]]


@jit
def _gated_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    parts,
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    GATE_ROW: tl.constexpr,
    WEIGHTS: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """PARTS groups, of the same row or of the next; parts: of all rows. WEIGHTS: from one group's to the next."""
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    row, group = (part // GROUPS).to(tl.int64), part % GROUPS
    columns = tl.arange(0, BLOCK)
    inside = (part < parts)[:, None] & (columns < WIDTH)[None, :]
    channels = (group * WIDTH)[:, None] + columns[None, :]
    x = tl.load(x_ptr + row[:, None] * X_ROW + channels, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row[:, None] * GATE_ROW + channels, inside, other=0.0).to(tl.float32)
    gate = silu(gate) if IS_SILU else sigmoid(gate)
    if not NORM_BEFORE_GATE:
        x *= gate
    if weight_ptr is not None:
        weights = (group * WEIGHTS)[:, None] + columns[None, :]
        weight = tl.load(weight_ptr + weights, inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight
    if NORM_BEFORE_GATE:
        x *= gate
    tl.store(y_ptr + row[:, None] * (GROUPS * WIDTH) + channels, x.to(y_ptr.dtype.element_ty), inside)
