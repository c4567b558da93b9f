"""The operation of reference.py in Triton. Each group of channels is read once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.norm.gated.reference import Activation
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import sigmoid, silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


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
    """Compute reference.gated_norm. x and gate, float32 or bfloat16, may be strided in their first dimension.

    weight: [channels], or [channels / groups] for a weight that all groups share.
    dtype: the result's dtype; None: the weight's dtype or, without a weight, x's dtype.
    """
    rows, channels = x.shape
    width = channels // groups
    default = x.dtype if weight is None else weight.dtype
    y = torch.empty(rows, channels, dtype=dtype or default, device=x.device)
    config = _config(width, x.device)
    launch(
        _gated_norm,
        (cdiv(rows * groups, config.blocks["PARTS"]),),
        *(x, gate, weight, y, rows * groups, eps),
        config=config,
        GROUPS=groups,
        WIDTH=width,
        X_ROW=row_stride(x),
        GATE_ROW=row_stride(gate),
        WEIGHTS=0 if weight is None or len(weight) == width else width,
        NORM_BEFORE_GATE=norm_before_gate,
        IS_SILU=activation == "silu",
        BLOCK=next_power_of_2(width),
    )
    return y


@by_shape
def _config(width: int, device: torch.device) -> KernelConfig:
    return config_of("norm.gated.gated_norm", f"width={width}", device, *candidates(width))


def candidates(width: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first.

    The default has about 8 elements per thread and at least 1024 per program.
    """
    block = next_power_of_2(width)
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
    """Compute PARTS consecutive groups, which may belong to several rows.

    parts: groups of all rows. WEIGHTS: elements from one group's weights to the next; 0 if all groups share weights.
    """
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
