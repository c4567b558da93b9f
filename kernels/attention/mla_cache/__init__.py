"""What latent attention keeps of a token: by native code or a GPU's kernel where there is one, else by torch."""

from torch import Tensor

from baton.kernels.attention.mla_cache import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["write_latents"]


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """See reference.write_latents."""
    if gpu.takes(projected):
        from baton.kernels.attention.mla_cache import triton

        return triton.write_latents(projected, weight, eps, pages, places)
    run = native.write_latents if native.takes(projected, weight, pages) else reference.write_latents
    return run(projected, weight, eps, pages, places)
