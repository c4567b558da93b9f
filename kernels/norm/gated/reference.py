"""Gated RMS norm over groups of channels, as after the recurrence of Mamba-2 (arXiv:2405.21060)."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Activation: TypeAlias = Literal["silu", "sigmoid"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""Activations f of the gate, by name."""


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: Activation = "silu",
) -> Tensor:
    """Return weight·rms_norm(x·f(gate)) or, with norm_before_gate, weight·rms_norm(x)·f(gate), in weight's dtype.

    f is the activation. Computed in float32.

    x, gate: [T, channels].
    weight: [channels]; None returns x·f(gate) without a norm, in x's dtype.
    eps: added to the mean square.
    groups: number of equal parts of the channels, each of which is normalised by its own mean square.
    """
    gate = ACTIVATIONS[activation](gate.float())
    if weight is None:
        return (x.float() * gate).to(x.dtype)
    x = x.float() if norm_before_gate else x.float() * gate
    parts = x.view(len(x), groups, x.shape[1] // groups)
    scale = (parts.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (parts * scale).view(x.shape) * weight.float()
    return (y * gate if norm_before_gate else y).to(weight.dtype)
