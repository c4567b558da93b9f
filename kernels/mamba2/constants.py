"""What a mixer computes with besides its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MixerConstants:
    """float32 and contiguous, prepared at load. Heads H, convolution of width K over `channels` = inner + 2·G·N.

    taps: [K, channels], the last for a token itself; conv_bias: [channels]; dt_bias, A (negative), D: [H];
    norm: [inner], its mean squares over norm_groups equal parts, with eps, after the gate or before it; None: there is
    only the gate. dt is clamped to dt_limits.
    """

    taps: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    norm: Tensor | None
    norm_groups: int
    eps: float
    dt_limits: tuple[float, float]
    norm_before_gate: bool = False
