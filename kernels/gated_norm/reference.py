"""RMS norm with a SiLU gate, over groups of channels."""

from torch import Tensor
from torch.nn import functional as F


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int = 1, norm_before_gate: bool = False
) -> Tensor:
    """weight·rms(x·silu(gate)) or, with norm_before_gate, weight·rms(x)·silu(gate), in weight's dtype.

    x, gate: [T, channels], computed in float32; each of `groups` equal parts has a mean square of its own. weight None:
    x·silu(gate), in x's dtype.
    """
    gate = F.silu(gate.float())
    if weight is None:
        return (x.float() * gate).to(x.dtype)
    x = x.float() if norm_before_gate else x.float() * gate
    parts = x.view(len(x), groups, x.shape[1] // groups)
    scale = (parts.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (parts * scale).view(x.shape) * weight.float()
    return (y * gate if norm_before_gate else y).to(weight.dtype)
