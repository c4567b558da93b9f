"""How a router chooses."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RoutingRule:
    """Each token gets top_k experts, and weights that come from their scores.

    scores: softmax or sigmoid of the logits. renormalise: weights are divided by their sum. scale: of all weights.
    Experts lie in `groups` of equal size side by side; only those of the groups_kept best can be chosen.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    renormalise: bool
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
