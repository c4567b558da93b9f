"""Which experts compute for a token: by Triton or native code where they compute, else by torch."""

from torch import Tensor

from baton.kernels.linear.dense import PackedWeight
from baton.kernels.moe.routing import native, reference
from baton.kernels.moe.routing.rule import RoutingRule
from baton.kernels.runtime.triton import takes

__all__ = ["RoutingRule", "pack", "route"]


def pack(router: Tensor) -> PackedWeight | None:
    """None where plain is best. router: [E, D]."""
    return native.pack(router) if native.takes(router) else None


def route(
    x: Tensor, router: Tensor | PackedWeight, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.route."""
    if isinstance(router, PackedWeight):
        return native.route(x, router, bias, rule, padding)
    if takes(x):
        from baton.kernels.moe.routing import triton

        return triton.route(x, router, bias, rule, padding)
    return reference.route(x, router, bias, rule, padding)
