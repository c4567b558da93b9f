"""Which experts compute for a token, and how much each counts."""

import torch
from torch import Tensor

from baton.kernels.moe.routing.rule import RoutingRule

LEAST = 1e-20
"""Added to what weights are divided by."""


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, the best first, and their weights: int32 and float32 [T, top_k].

    x: [T, D]; router: [E, D]; all is computed in float32. bias: float32 [E] or None, of sigmoid scores: it has a say in
    who is chosen and none in the weights. A group counts as much as its two best experts together (DeepSeek-V3,
    arXiv:2412.19437). Of equals the first is chosen. padding: bool [T], rows that get no expert: -1.
    """
    logits = x.float() @ router.float().t()
    wanted = logits
    if rule.scores == "sigmoid":
        wanted = logits.sigmoid() if bias is None else logits.sigmoid() + bias
    chosen = _best(_within_groups(wanted, rule), rule.top_k)
    weights = _weigh(logits, chosen, rule)
    return (chosen if padding is None else chosen.masked_fill(padding[:, None], -1)).int(), weights


def _within_groups(wanted: Tensor, rule: RoutingRule) -> Tensor:
    """-∞ for experts of groups that are not kept."""
    if rule.groups_kept == rule.groups:
        return wanted
    groups = wanted.view(len(wanted), rule.groups, wanted.shape[1] // rule.groups)
    of_group = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, _best(of_group, rule.groups_kept), True)
    return groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _weigh(logits: Tensor, chosen: Tensor, rule: RoutingRule) -> Tensor:
    if rule.scores == "sigmoid":
        scores = logits.sigmoid()
    elif rule.renormalise:
        scores = (logits - logits.amax(1, keepdim=True)).exp()
    else:
        scores = logits.softmax(1)
    weights = scores.gather(1, chosen)
    if rule.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST)
    return weights * rule.scale
