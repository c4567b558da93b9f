"""Mixtures of experts: routers, and the experts that they choose from."""

import torch
from torch import Tensor, nn

from kernels.experts import PARTS, Activation, experts
from kernels.routing import RoutingRule, route
from models.config import ModelError


class Experts(nn.Module):
    """Routed experts: input_linear [count, 2·intermediate, hidden] (gate, then up; or [count, intermediate, hidden]
    with relu2), output_linear [count, hidden, intermediate]."""

    def __init__(self, hidden: int, intermediate: int, count: int, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = activation
        inner = PARTS[activation] * intermediate
        self.input_linear = nn.Parameter(torch.empty(count, inner, hidden, dtype=dtype))
        self.output_linear = nn.Parameter(torch.empty(count, hidden, intermediate, dtype=dtype))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [T, hidden] → [T, hidden]; chosen, weights: what a router gives."""
        return experts(x, chosen, weights, self.input_linear, self.output_linear, self.activation)


class SoftmaxRouter(nn.Module):
    """Softmax scores: those of all experts, divided by the sum of the chosen ones' if `renormalise`; or the softmax of
    the chosen ones' logits alone (not softmax_first), which is the same as the former renormalised.

    weight: [count, hidden].
    """

    def __init__(
        self, hidden: int, count: int, top_k: int, renormalise: bool, dtype: torch.dtype, softmax_first: bool
    ) -> None:
        super().__init__()
        check_choice(count, top_k)
        self.rule = RoutingRule(top_k, "softmax", renormalise or not softmax_first)
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden] → chosen int32 and weights float32 [T, top_k]."""
        return route(x, self.weight, None, self.rule)


class SigmoidRouter(nn.Module):
    """Sigmoid scores, chosen with a correction that has no say in the weights, within the best groups.

    weight: [count, hidden], e_score_correction_bias: [count], both float32. rule: with sigmoid scores.
    """

    def __init__(self, hidden: int, count: int, rule: RoutingRule) -> None:
        super().__init__()
        check_choice(count, rule.top_k)
        check_groups(count, rule)
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(count, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden] → chosen int32 and weights float32 [T, top_k]."""
        return route(x, self.weight, self.e_score_correction_bias, self.rule)


def check_choice(count: int, top_k: int) -> None:
    """ModelError unless there are as many experts as a token has."""
    if top_k > count:
        raise ModelError(f"config.json: a token cannot have {top_k} of {count} experts")


def check_groups(count: int, rule: RoutingRule) -> None:
    """ModelError unless a token's experts can be chosen within its groups."""
    if count % rule.groups:
        raise ModelError(f"config.json: {count} experts cannot lie in {rule.groups} groups evenly")
    if rule.groups_kept > rule.groups:
        raise ModelError(f"config.json: {rule.groups_kept} of {rule.groups} groups of experts cannot be kept")
    if rule.groups_kept * (count // rule.groups) < rule.top_k:
        raise ModelError(
            f"config.json: {rule.groups_kept} groups of {count // rule.groups} experts hold fewer than {rule.top_k}"
        )
