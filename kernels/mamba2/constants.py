"""The weights and constants of a Mamba-2 mixer other than its two projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MixerConstants:
    """A mixer's constants, prepared at load: contiguous float32 tensors.

    The mixer has H heads of width P (inner = H·P), G groups of B and C with N states each, and a convolution of K taps
    over `channels` = inner + 2·G·N.
    """

    taps: Tensor  # [K, channels]; taps[K-1] multiplies the current token
    conv_bias: Tensor | None  # [channels]
    dt_bias: Tensor  # [H], added to dt before the softplus
    A: Tensor  # [H], negative
    D: Tensor  # [H]
    norm: Tensor | None  # [inner], weight of the gated RMS norm; None: there is only the gate
    norm_groups: int  # equal parts of the channels, each of which is normalised by its own mean square
    eps: float  # added to the mean squares of the norm
    dt_limits: tuple[float, float]  # range that dt is clamped to
    norm_before_gate: bool = False  # True: apply the gate after the norm; False: before it
