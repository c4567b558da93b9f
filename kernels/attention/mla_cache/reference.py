"""The cache entry of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): its norm, and the write to pages."""

import torch
from torch import Tensor


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """Write [weight · rms_norm(latent), shared key] of each token to the pages, in place.

    projected: [T, rank + shared], the latent followed by the part of the key that all heads share.
    weight: [rank]; the norm is computed in float32 and rounded to weight's dtype.
    pages: [pages, page_size, 1, rank + shared], of any dtype.
    places: int64 [T], each token's flat cache index: page · page_size + offset.
    """
    rank = len(weight)
    latent = projected[:, :rank].float()
    scale = (latent.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (latent * scale * weight.float()).to(weight.dtype)
    row = torch.cat([normed.to(pages.dtype), projected[:, rank:].to(pages.dtype)], dim=1)
    pages[places // pages.shape[1], places % pages.shape[1], 0] = row
