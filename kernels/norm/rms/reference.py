"""RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467) of a residual stream, fused with the add before it."""

from torch import Tensor


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum residual + multiplier·x in residual's dtype, and (offset + weight)·rms_norm(sum) in weight's.

    Computed in float32, except that the norm reads the sum after it was rounded to residual's dtype.

    residual, x: [T, hidden], float32 or bfloat16 each. x None: there is nothing to add.
    weight: [hidden], float32 or bfloat16.
    eps: added to the mean square.
    offset: 1 for checkpoints that store weight - 1, else 0.
    """
    if x is not None:
        residual = (residual.float() + x.float() * multiplier).to(residual.dtype)
    exact = residual.float()
    scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return residual, (exact * scale * (weight.float() + offset)).to(weight.dtype)
