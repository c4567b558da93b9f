"""What delta nets compute with besides their projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaConstants:
    """Constants of a layer with a decay for each head, float32 and contiguous, prepared at load.

    Hv value heads of size Dv, Hk key heads of size Dk; the convolution has width K and `channels` = 2·Hk·Dk + Hv·Dv.
    """

    taps: Tensor  # [K, channels]; the last tap is for a token itself
    conv_bias: Tensor | None  # [channels]
    dt_bias: Tensor  # [Hv]
    A: Tensor  # [Hv], negative
    norm: Tensor  # [Dv], the same for each head
    key_heads: int  # Hk; value head h reads key head h // (Hv // Hk)
    eps: float  # of the norm


@dataclass(frozen=True)
class KdaConstants:
    """Constants of a layer with a decay for each channel of the keys (Kimi Delta Attention), float32 and contiguous.

    H heads with keys of size Dk and values of size Dv; the convolution has width K and `channels` = H·(2·Dk + Dv).
    """

    taps: Tensor  # [K, channels]; the last tap is for a token itself
    dt_bias: Tensor  # [H·Dk]
    A: Tensor  # [H], negative
    norm: Tensor  # [Dv], the same for each head
    eps: float  # of the norm
