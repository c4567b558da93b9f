"""The operation of reference.py in Triton: one program per token, which reads the token's numbers once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.norm.rms.triton import candidates
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import next_power_of_2


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """Compute reference.write_latents. `projected` and `pages` may be strided in their first dimension."""
    (tokens, width), rank = projected.shape, len(weight)
    launch(
        _write_latents,
        (tokens,),
        *(projected, weight, pages, places, eps),
        config=_config(width, projected.device),
        WIDTH=width,
        RANK=rank,
        PAGE=pages.shape[1],
        ROW=row_stride(projected),
        PAGE_STRIDE=row_stride(pages),
        BLOCK=next_power_of_2(width),
    )


@by_shape
def _config(width: int, device: torch.device) -> KernelConfig:
    return config_of("attention.mla_cache.write_latents", f"width={width}", device, *candidates(width))


@jit
def _write_latents(
    projected_ptr,
    weight_ptr,
    pages_ptr,
    places_ptr,
    eps,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise the latent of one token, and write it and the shared key to the token's place in the pages."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_latent, inside = column < RANK, column < WIDTH
    values = tl.load(projected_ptr + token * ROW + column, inside, other=0.0)
    latent = tl.where(is_latent, values.to(tl.float32), 0.0)
    scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    normed = latent * scale * tl.load(weight_ptr + column, is_latent, other=0.0).to(tl.float32)
    # Round to the weight's dtype and then to the pages' dtype, as the reference does.
    normed = normed.to(weight_ptr.dtype.element_ty).to(pages_ptr.dtype.element_ty)
    place = tl.load(places_ptr + token)
    target_ptr = pages_ptr + (place // PAGE) * PAGE_STRIDE + (place % PAGE) * WIDTH
    tl.store(target_ptr + column, tl.where(is_latent, normed, values.to(pages_ptr.dtype.element_ty)), inside)
