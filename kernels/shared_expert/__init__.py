"""Routed experts and the one that all tokens share, together."""

from torch import Tensor

from kernels.shared_expert import reference

__all__ = ["add_shared"]


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """See reference.add_shared."""
    return reference.add_shared(routed, shared, gate)
