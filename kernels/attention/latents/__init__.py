"""Causal attention of one segment over latents (MLA), expanded to keys and values: for long segments on a GPU."""

from baton.kernels.attention.latents import reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["attend_by_heads"]

attend_by_heads = dispatch(reference.attend_by_heads, triton="baton.kernels.attention.latents.triton")
