"""Projections with weights stored as integers, and inputs that are rounded to integers of 8 bits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.quantized.forms import Form, Groups

LEAST_GROUP = 32
"""Minimum number of consecutive inputs that share a scale."""
LEAST = 1e-30
"""Groups without a larger magnitude become zeros."""


def group_of(form: Form) -> int:
    """Return how many inputs share a scale, for weights of a form: a group of the weights, or two of 16 inputs."""
    return max(form.group, LEAST_GROUP)


def round_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round inputs [T, inputs] to integers of 8 bits with a scale for each group of inputs: x ≈ codes · scales.

    Each scale is the largest magnitude of its group, divided by 127, so no input is clipped.

    Return codes, int8 [T, groups·group] with zeros for padding, and scales, float32 [T, groups].
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    largest = groups.abs().amax(2)
    factors = torch.where(largest < LEAST, 0.0, 127 / largest)
    codes = (groups.double() * factors[:, :, None].double()).round().to(torch.int8)  # The products are exact.
    return codes.flatten(1), torch.where(largest < LEAST, 0.0, largest / 127)


def linear(x: Tensor, weight: Groups, bias: Tensor | None) -> Tensor:
    """Return rounded x @ weightᵀ + bias, [T, outputs] in x's dtype; the products are exact before they are added up.

    x: [T, inputs]. bias: [outputs] or None.
    """
    group = group_of(weight.form)
    codes, scales = round_inputs(x, group)
    rounded = (codes.view(len(x), -1, group).float() * scales[:, :, None]).flatten(1)
    numbers = F.pad(weight.numbers(), (0, rounded.shape[1] - weight.codes.shape[1]))
    y = rounded @ numbers.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)
