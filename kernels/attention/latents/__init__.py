"""Attention of one prompt over latents, with keys and values by head: for long prompts on a GPU."""

from baton.kernels.attention.latents import reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["attend_by_heads"]

attend_by_heads = dispatch(reference.attend_by_heads, triton="baton.kernels.attention.latents.triton")
