"""What latent attention keeps of a token: by native code where it is installed, else by torch."""

from torch import Tensor

from kernels.latents import native, reference

__all__ = ["write_latents"]


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """See reference.write_latents."""
    run = native.write_latents if native.takes(projected, weight, pages) else reference.write_latents
    run(projected, weight, eps, pages, places)
