"""What routed experts and the one that all tokens share make together."""

from torch import Tensor


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """routed + sigmoid(gate)·shared, or without a gate their sum, computed in float32, in routed's dtype.

    routed, shared: [T, D]; gate: [T, 1], before the sigmoid.
    """
    counted = shared.float() if gate is None else gate.float().sigmoid() * shared.float()
    return (routed.float() + counted).to(routed.dtype)
