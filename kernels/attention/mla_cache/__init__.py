"""The cache entries of latent attention (MLA): normalise each token's latent, and write it to a page."""

from baton.kernels.attention.mla_cache import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["write_latents"]

write_latents = dispatch(
    reference.write_latents,
    (native.takes, native.write_latents),
    triton="baton.kernels.attention.mla_cache.triton",
)
