"""The weights and constants of a delta net layer other than its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaConstants:
    """The constants of a gated delta net, which has one decay per head: float32 and contiguous, prepared at load.

    It has Hv value heads of size Dv and Hk key heads of size Dk. Its convolution has width K and
    channels = 2·Hk·Dk + Hv·Dv.
    """

    taps: Tensor  # [K, channels]; the last tap is multiplied with the current token
    conv_bias: Tensor | None  # [channels]
    dt_bias: Tensor  # [Hv]
    A: Tensor  # [Hv], negative
    norm: Tensor  # [Dv], shared by all heads
    key_heads: int  # Hk; value head h uses key head h // (Hv // Hk)
    eps: float  # added to the mean square in the norm
    beta_scale: float = 1.0  # factor of σ(b), at most 2; above 1, a step may reverse the sign of what the state stores


@dataclass(frozen=True)
class KdaConstants:
    """The constants of Kimi Delta Attention, which has one decay per channel of the keys: float32 and contiguous.

    It has H heads with keys of size Dk and values of size Dv. Its convolution has width K and channels = H·(2·Dk + Dv).
    """

    taps: Tensor  # [K, channels]; the last tap is multiplied with the current token
    dt_bias: Tensor  # [H·Dk]
    A: Tensor  # [H], negative
    norm: Tensor  # [Dv], shared by all heads
    eps: float  # added to the mean square in the norm
    lower_bound: float | None = None  # the lower bound of the log decays, below 0; None: unbounded
