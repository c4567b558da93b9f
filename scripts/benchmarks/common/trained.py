"""Random models with statistics of trained ones, for errors that a plain random initialisation hides."""

import torch
from torch import Tensor, nn

from baton.models.batch import Model
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.norm import RMSNorm

FREEDOM = 5
"""Degrees of freedom of Student's t, the distribution of weights: some weights are far larger than most."""
LARGE, FACTOR = 0.02, 8.0
"""The share of the residual stream's channels that are large after norms, and how much larger they are."""
SENSITIVITY = 3.0
"""The factor of the float rows of projections: decay, dt, β and gates of a trained model use their whole range."""
LOGITS = 3.0
"""The standard deviation of logits: a trained model prefers few tokens."""


def imitate_training(model: Model, seed: int) -> None:
    """Give the weights of a random model the statistics of trained weights. Call this before weights are packed."""
    assert isinstance(model, nn.Module)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1 and not isinstance(module, Embedding):
                spread(weight.data, generator)
            elif isinstance(module, RMSNorm) and name == "weight":
                enlarge(weight.data, module.offset, generator)
        if isinstance(module, Linear) and module.floats:
            module.weight.data[-module.floats :] *= SENSITIVITY
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.weight.data *= LOGITS


def spread(weight: Tensor, generator: torch.Generator) -> None:
    """Divide normally distributed weights by a random scale each, so that Student's t is their distribution.

    Their standard deviation stays the same.
    """
    normal = torch.empty(FREEDOM, *weight.shape).normal_(generator=generator)
    weight *= ((FREEDOM - 2) / normal.square().sum(0)).sqrt()


def enlarge(weight: Tensor, offset: float, generator: torch.Generator) -> None:
    """Multiply a norm's factors, offset + weight, by FACTOR in a share of the channels."""
    large = torch.rand(weight.shape, generator=generator) < LARGE
    factors = torch.where(large, FACTOR, 1.0) * weight.new_ones(())
    weight.copy_(factors - offset)
