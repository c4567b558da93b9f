"""Routed experts and the one that all tokens share, together."""

from torch import Tensor

from baton.kernels.moe.shared_expert import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["add_shared"]


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """See reference.add_shared."""
    if gpu.takes(routed):
        from baton.kernels.moe.shared_expert import triton

        return triton.add_shared(routed, shared, gate)
    if native.takes(routed, shared, gate):
        return native.add_shared(routed, shared, gate)
    return reference.add_shared(routed, shared, gate)
