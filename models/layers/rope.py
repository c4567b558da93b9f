"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) that pairs the halves of a head."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.models.config import ModelConfig, ModelError


class Rotation(NamedTuple):
    """Cosines and sines for the positions of a step: float32 [tokens, 1, RotationSettings.width]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RotationSettings:
    """Settings of the position encoding.

    The first half of `width` numbers is paired with the second half, and each pair has an angle.
    """

    width: int  # how many numbers of each head are paired, from the first on; the rest is unchanged
    theta: float  # the base of the angles
    turned: int | None = None  # how many pairs are rotated, from the first on; the rest is unchanged. None: all

    def of(self, positions: Tensor) -> Rotation:
        """Return the rotation for positions, int64 [tokens]."""
        exponent = torch.arange(0, self.width, 2, dtype=torch.float32, device=positions.device) / self.width
        frequency = self.theta**-exponent
        if self.turned is not None:
            frequency[self.turned :] = 0
        angle = positions[:, None].float() * frequency
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return Rotation(angle.cos(), angle.sin())


def read_rotation(config: ModelConfig, head_dim: int, share: float = 1.0) -> RotationSettings:
    """Read rope_theta and partial_rotary_factor, from rope_scaling, from rope_parameters, or from the top level.

    share: the default of partial_rotary_factor, the share of a head's numbers that is rotated.
    Raises ModelError for scaled rotations, for rotations that differ by the kind of layer, and for an odd width.
    """
    nested: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.values.get(name) or {}
        plain = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
        if not plain or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ModelError(f"config.json: {name} {rope} is not supported: only the default rotation is")
        nested |= rope
    settings = ModelConfig({**config.values, **nested})
    factor = settings.number("partial_rotary_factor", default=share)
    width = int(head_dim * factor)
    if width % 2 or not 0 < width <= head_dim:
        part = "" if factor == 1 else f" · partial_rotary_factor {factor}"
        raise ModelError(f"config.json: head_dim = {head_dim}{part} cannot be rotated: it should be even and above 0")
    return RotationSettings(width, settings.number("rope_theta", default=10000.0))
