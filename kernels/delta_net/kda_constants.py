"""What Kimi Delta Attention computes with besides its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KdaConstants:
    """float32 and contiguous, prepared at load. H heads with keys of size Dk and values of size Dv; the convolution of
    width K is over `channels` = H·(2·Dk + Dv).

    taps: [K, channels], the last for a token itself; dt_bias: [H·Dk]; A (negative): [H]; norm: [Dv], of each head,
    with eps.
    """

    taps: Tensor
    dt_bias: Tensor
    A: Tensor
    norm: Tensor
    eps: float
