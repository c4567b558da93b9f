"""Router of a mixture of experts: which experts a token gets, and the weight of each."""

import torch
from torch import Tensor

from baton.kernels.moe.routing.rule import RoutingRule

LEAST = 1e-20
"""Added to the sum that weights are divided by, against division by zero."""


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, best first, and compute their weights: int32 and float32 [T, top_k].

    Computed in float32. On a tie the lower expert number wins. A group of experts is ranked by the sum of its two best
    scores (DeepSeek-V3, arXiv:2412.19437).

    x: [T, D].
    router: [E, D].
    bias: float32 [E] or None, added to sigmoid scores. It affects which experts are chosen, not their weights.
    padding: bool [T] or None; rows for which it is true get expert -1, that is none.
    """
    logits = x.float() @ router.float().t()
    ranking = logits
    if rule.scores == "sigmoid":
        ranking = logits.sigmoid() if bias is None else logits.sigmoid() + bias
    chosen = _best(_within_groups(ranking, rule), rule.top_k)
    weights = _weigh(logits, chosen, rule)
    return (chosen if padding is None else chosen.masked_fill(padding[:, None], -1)).int(), weights


def _within_groups(ranking: Tensor, rule: RoutingRule) -> Tensor:
    """Return the ranking with -∞ for experts outside the best `groups_kept` groups."""
    if rule.groups_kept == rule.groups:
        return ranking
    groups = ranking.view(len(ranking), rule.groups, ranking.shape[1] // rule.groups)
    of_group = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
    eligible = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, _best(of_group, rule.groups_kept), True)
    return groups.masked_fill(~eligible[:, :, None], -torch.inf).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` greatest values of each row, greatest first, the lower index on a tie."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _weigh(logits: Tensor, chosen: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weights [T, top_k] of the chosen experts."""
    if rule.scores == "sigmoid":
        scores = logits.sigmoid()
    elif rule.renormalise:  # The softmax's denominator cancels, so it need not be computed.
        scores = (logits - logits.amax(1, keepdim=True)).exp()
    else:
        scores = logits.softmax(1)
    weights = scores.gather(1, chosen)
    if rule.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST)
    return weights * rule.scale
