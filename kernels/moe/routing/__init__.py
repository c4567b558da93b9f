"""The choice of experts for each token: in Triton or native code where they apply, else in torch."""

from torch import Tensor

from baton.kernels.linear.dense import PackedWeight
from baton.kernels.moe.routing import native, reference
from baton.kernels.moe.routing.rule import RoutingRule
from baton.kernels.runtime.triton import takes

__all__ = ["RoutingRule", "pack", "route"]


def pack(router: Tensor) -> PackedWeight | None:
    """Pack a router's weight [E, D]; return None if native code cannot compute with it."""
    return native.pack(router) if native.takes(router) else None


def route(
    x: Tensor, router: Tensor | PackedWeight, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute reference.route with the fastest form that takes the arguments."""
    if isinstance(router, PackedWeight):
        return native.route(x, router, bias, rule, padding)
    if takes(x):
        from baton.kernels.moe.routing import triton

        return triton.route(x, router, bias, rule, padding)
    return reference.route(x, router, bias, rule, padding)
