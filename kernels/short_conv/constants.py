"""The weights of a short convolution's layer other than its two projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ShortConvConstants:
    """A layer's constants, prepared at load: contiguous float32 tensors."""

    taps: Tensor  # [K, channels]; taps[K-1] multiplies the current token
    bias: Tensor | None  # [channels]
