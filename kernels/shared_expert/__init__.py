"""Routed experts and the one that all tokens share, together."""

from torch import Tensor

from kernels.shared_expert import native, reference

__all__ = ["add_shared"]


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """See reference.add_shared."""
    if native.takes(routed, shared, gate):
        return native.add_shared(routed, shared, gate)
    return reference.add_shared(routed, shared, gate)
