"""What a gated delta net computes with besides its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaConstants:
    """float32 and contiguous, prepared at load. Hv value heads of size Dv, Hk key heads of size Dk; the convolution of
    width K is over `channels` = 2·Hk·Dk + Hv·Dv.

    taps: [K, channels], the last for a token itself; conv_bias: [channels]; dt_bias, A (negative): [Hv];
    norm: [Dv], of each head, with eps. Value head h reads key head h // (Hv // key_heads).
    """

    taps: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    norm: Tensor
    key_heads: int
    eps: float
