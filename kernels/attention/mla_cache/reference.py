"""What latent attention keeps of a token (DeepSeek-V2, arXiv:2405.04434): a norm, and the writing into pages."""

import torch
from torch import Tensor


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """Store [weight·rms-normed latent, shared key] of each token at places int64 [T] = page · page_size + offset.

    projected: [T, rank + shared]: the latent, and the part of the keys that all heads share; weight: [rank], computed
    in float32, rounded to weight's dtype. pages: [pages, page_size, 1, rank + shared].
    """
    rank = len(weight)
    latent = projected[:, :rank].float()
    scale = (latent.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (latent * scale * weight.float()).to(weight.dtype)
    row = torch.cat([normed.to(pages.dtype), projected[:, rank:].to(pages.dtype)], dim=1)
    pages[places // pages.shape[1], places % pages.shape[1], 0] = row
