"""The rule by which a router chooses experts."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RoutingRule:
    """The number of experts that a token gets, their groups, and how their weights follow from the router's logits."""

    top_k: int  # experts per token
    scores: Literal["softmax", "sigmoid"]  # function of the logits that gives the weights
    renormalise: bool  # divide the weights of the chosen experts by their sum
    groups: int = 1  # groups of equal size that the experts are divided into, in the order of their numbers
    groups_kept: int = 1  # number of best groups; only their experts can be chosen
    scale: float = 1.0  # factor of all weights, applied last
