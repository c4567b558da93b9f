"""RMS norm with a gate, over groups of channels."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Activation: TypeAlias = Literal["silu", "sigmoid"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""Of the gate."""


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: Activation = "silu",
) -> Tensor:
    """weight·rms(x·f(gate)) or, with norm_before_gate, weight·rms(x)·f(gate), in weight's dtype; f is the activation.

    x, gate: [T, channels], computed in float32; each of `groups` equal parts has a mean square of its own. weight None:
    x·f(gate), in x's dtype.
    """
    gate = ACTIVATIONS[activation](gate.float())
    if weight is None:
        return (x.float() * gate).to(x.dtype)
    x = x.float() if norm_before_gate else x.float() * gate
    parts = x.view(len(x), groups, x.shape[1] // groups)
    scale = (parts.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (parts * scale).view(x.shape) * weight.float()
    return (y * gate if norm_before_gate else y).to(weight.dtype)
