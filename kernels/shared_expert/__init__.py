"""Routed experts and the one that all tokens share, together."""

from torch import Tensor

from baton.kernels import gpu
from baton.kernels.shared_expert import native, reference

__all__ = ["add_shared"]


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """See reference.add_shared."""
    if gpu.takes(routed):
        from baton.kernels.shared_expert import triton

        return triton.add_shared(routed, shared, gate)
    if native.takes(routed, shared, gate):
        return native.add_shared(routed, shared, gate)
    return reference.add_shared(routed, shared, gate)
