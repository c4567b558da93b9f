"""Mixtures of experts: routers, and the experts that they choose from."""

import torch
from torch import Tensor, nn

from baton.kernels.linear.dense import PackedWeight
from baton.kernels.moe.experts import PARTS, Activation, PackedExperts, experts, pack
from baton.kernels.moe.routing import RoutingRule, pack as pack_router, route
from baton.models.config import ModelError


class Experts(nn.Module):
    """Routed experts: input_linear [count, 2·intermediate, hidden] (gate, then up; or [count, intermediate, hidden]
    with relu2), output_linear [count, hidden, intermediate]."""

    def __init__(self, hidden: int, intermediate: int, count: int, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation, self.count = activation, count
        inner = PARTS[activation] * intermediate
        self.input_linear = nn.Parameter(torch.empty(count, inner, hidden, dtype=dtype))
        self.output_linear = nn.Parameter(torch.empty(count, hidden, intermediate, dtype=dtype))
        self.packed: dict[str, PackedExperts] = {}

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [T, hidden] → [T, hidden]; chosen, weights: what a router gives."""
        first = self.packed.get("input_linear", self.input_linear)
        second = self.packed.get("output_linear", self.output_linear)
        return experts(x, chosen, weights, first, second, self.activation)

    def pack(self, bits: int | None = None) -> None:
        """See Linear.pack. Of the two weights, those that have been loaded and are not packed yet."""
        for name, parts in (("input_linear", PARTS[self.activation]), ("output_linear", 1)):
            weight = getattr(self, name)
            packed = None if weight.is_meta or name in self.packed else pack(weight, parts, bits)
            if packed:
                self.packed[name] = packed
                setattr(self, name, nn.Parameter(packed.data, requires_grad=False))


class SoftmaxRouter(nn.Module):
    """Softmax scores: those of all experts, divided by the sum of the chosen ones' if `renormalise`; or the softmax of
    the chosen ones' logits alone (not softmax_first), which is the same as the former renormalised.

    weight: [count, hidden].
    """

    def __init__(
        self, hidden: int, count: int, top_k: int, renormalise: bool, dtype: torch.dtype, softmax_first: bool
    ) -> None:
        super().__init__()
        self.rule = RoutingRule(top_k, "softmax", renormalise or not softmax_first)
        check_rule(count, self.rule)
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=dtype))
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [T, hidden] → chosen int32 and weights float32 [T, top_k]; padding: bool [T], rows without experts."""
        return route(x, self.packed or self.weight, None, self.rule, padding)

    def pack(self, bits: int | None = None) -> None:
        """See Linear.pack; whatever the bits, a router keeps its numbers."""
        self.packed = pack_router(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class SigmoidRouter(nn.Module):
    """Sigmoid scores, chosen with a correction that has no say in the weights, within the best groups.

    weight: [count, hidden], e_score_correction_bias: [count], both float32. rule: with sigmoid scores.
    """

    def __init__(self, hidden: int, count: int, rule: RoutingRule) -> None:
        super().__init__()
        check_rule(count, rule)
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(count, dtype=torch.float32))
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """See SoftmaxRouter."""
        return route(x, self.packed or self.weight, self.e_score_correction_bias, self.rule, padding)

    def pack(self, bits: int | None = None) -> None:
        """See SoftmaxRouter.pack."""
        self.packed = pack_router(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


def check_rule(count: int, rule: RoutingRule) -> None:
    """ModelError unless the experts of a token can be chosen from so many, within its groups."""
    if rule.top_k > count:
        raise ModelError(f"config.json: a token cannot have {rule.top_k} of {count} experts")
    if count % rule.groups:
        raise ModelError(f"config.json: {count} experts cannot lie in {rule.groups} groups evenly")
    if rule.groups_kept > rule.groups:
        raise ModelError(f"config.json: {rule.groups_kept} of {rule.groups} groups of experts cannot be kept")
    if rule.groups_kept * (count // rule.groups) < rule.top_k:
        raise ModelError(
            f"config.json: {rule.groups_kept} groups of {count // rule.groups} experts hold fewer than {rule.top_k}"
        )
