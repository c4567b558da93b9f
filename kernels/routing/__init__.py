"""Which experts compute for a token: by Triton or native code where they compute, else by torch."""

from torch import Tensor

from baton.kernels import gpu
from baton.kernels.linear import PackedWeight
from baton.kernels.routing import native, reference
from baton.kernels.routing.rule import RoutingRule

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
    if gpu.takes(x):
        from baton.kernels.routing import triton

        return triton.route(x, router, bias, rule, padding)
    return reference.route(x, router, bias, rule, padding)
