"""Sum of the routed experts' output and that of the shared expert, which every token passes through."""

from torch import Tensor


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return routed + sigmoid(gate)·shared, or routed + shared without a gate, in routed's dtype.

    Computed in float32. routed, shared: [T, D]. gate: [T, 1], before the sigmoid, or None.
    """
    gated = shared.float() if gate is None else gate.float().sigmoid() * shared.float()
    return (routed.float() + gated).to(routed.dtype)
