"""Mixtures of experts: routers, and the experts among which they choose."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from baton.kernels.linear.dense import PackedWeight
from baton.kernels.moe.experts import PARTS, Activation, PackedExperts, experts, pack
from baton.kernels.moe.routing import RoutingRule, pack as pack_router, route
from baton.models.config import ModelConfig, ModelError


class Experts(nn.Module):
    """The routed experts of a layer.

    input_linear: [count, 2·intermediate, hidden], gate rows before up rows; for relu2 [count, intermediate, hidden].
    output_linear: [count, hidden, intermediate].
    """

    def __init__(self, hidden: int, intermediate: int, count: int, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation, self.count = activation, count
        inner = PARTS[activation] * intermediate
        self.input_linear = nn.Parameter(torch.empty(count, inner, hidden, dtype=dtype))
        self.output_linear = nn.Parameter(torch.empty(count, hidden, intermediate, dtype=dtype))
        self.packed: dict[str, PackedExperts] = {}

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the output [tokens, hidden] for x [tokens, hidden]. chosen, weights: what a router returns for x."""
        first = self.packed.get("input_linear", self.input_linear)
        second = self.packed.get("output_linear", self.output_linear)
        return experts(x, chosen, weights, first, second, self.activation)

    def pack(self, bits: int | None = None) -> None:
        """Pack the weights as Linear.pack does. Weights that are not loaded yet or are packed already are skipped."""
        for name, parts in (("input_linear", PARTS[self.activation]), ("output_linear", 1)):
            weight = getattr(self, name)
            packed = None if weight.is_meta or name in self.packed else pack(weight, parts, bits)
            if packed:
                self.packed[name] = packed
                setattr(self, name, nn.Parameter(packed.data, requires_grad=False))

    def keep(self, name: str, packed: PackedExperts) -> None:
        """Set input_linear or output_linear."""
        self.packed[name] = packed
        setattr(self, name, nn.Parameter(packed.data, requires_grad=False))

    def round_inputs(self) -> None:
        """Let quantized weights round their inputs to integers of 8 bits."""
        for name, packed in self.packed.items():
            self.packed[name] = replace(packed, rounds_inputs=packed.form is not None)


class SoftmaxRouter(nn.Module):
    """A router that weights the experts that it chooses by the softmax of their logits.

    softmax_first: true takes the softmax over all experts, after which `renormalise` divides the chosen experts' scores
    by their sum. False takes the softmax over the chosen experts only, which is the same as renormalising.
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
        """Return the chosen experts, int32 [tokens, top_k], and their weights, float32 [tokens, top_k].

        x: hidden states, [tokens, hidden].
        padding: bool [tokens], true for tokens that get no experts; None if each token gets experts.
        """
        return route(x, self.packed or self.weight, None, self.rule, padding)

    def pack(self, bits: int | None = None) -> None:
        """Pack the weight as Linear.pack does. The weight is never quantized, whatever `bits` is."""
        self.packed = pack_router(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class SigmoidRouter(nn.Module):
    """A router that weights the experts that it chooses by the sigmoid of their logits.

    Experts are chosen within the best groups, by score plus a correction. The correction does not change the weights.
    weight: float32 [count, hidden]. e_score_correction_bias: float32 [count]; None if not `corrected`.
    rule: a routing rule with sigmoid scores.
    """

    def __init__(self, hidden: int, count: int, rule: RoutingRule, corrected: bool = True) -> None:
        super().__init__()
        check_rule(count, rule)
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=torch.float32))
        correction = nn.Parameter(torch.empty(count, dtype=torch.float32)) if corrected else None
        self.e_score_correction_bias = correction
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, as SoftmaxRouter.forward does."""
        return route(x, self.packed or self.weight, self.e_score_correction_bias, self.rule, padding)

    def pack(self, bits: int | None = None) -> None:
        """Pack the weight as Linear.pack does. The weight is never quantized, whatever `bits` is."""
        self.packed = pack_router(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


def read_sigmoid_rule(
    config: ModelConfig,
    *,
    top_k: int,
    renormalise: tuple[str, ...] = ("norm_topk_prob",),
    groups: tuple[str, ...] = ("n_group",),
) -> RoutingRule:
    """Read the routing rule of a SigmoidRouter from config.json.

    renormalise, groups: the keys that the family has for these two settings.
    """
    return RoutingRule(
        top_k=top_k,
        scores="sigmoid",
        renormalise=config.flag(*renormalise, default=True),
        groups=config.integer(*groups, default=1),
        groups_kept=config.integer("topk_group", default=1),
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def check_rule(count: int, rule: RoutingRule) -> None:
    """Raise ModelError unless the rule can choose its top_k of `count` experts, within the groups that it keeps."""
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
