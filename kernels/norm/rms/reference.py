"""RMS norm of a residual stream to which a layer's output is added first."""

from torch import Tensor


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """residual + multiplier·x in residual's dtype, and (offset + weight)·rms-normed of that in weight's dtype.

    residual, x: [T, hidden]; weight: [hidden]; float32 or bfloat16 each, computed in float32. x None: nothing to add.
    offset: 1 where files hold weights less 1.
    """
    if x is not None:
        residual = (residual.float() + x.float() * multiplier).to(residual.dtype)
    exact = residual.float()
    scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return residual, (exact * scale * (weight.float() + offset)).to(weight.dtype)
