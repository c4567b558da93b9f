"""Which experts compute for a token."""

from torch import Tensor

from kernels.routing import reference
from kernels.routing.rule import RoutingRule

__all__ = ["RoutingRule", "route"]


def route(x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See reference.route."""
    return reference.route(x, router, bias, rule)
