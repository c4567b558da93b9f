"""The gated short convolution of LFM2 (Liquid AI, 2025, arXiv:2511.23404)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from baton.kernels.short_conv import ShortConvConstants, short_conv_decode, short_conv_decode_drafts, short_conv_prefill
from baton.models.batch import TensorSpec
from baton.models.layers.linear import Linear
from baton.models.layers.mamba2 import Conv1d
from baton.models.layers.step import BatchPlan, MixKernels

KERNELS = MixKernels(short_conv_prefill, short_conv_decode, short_conv_decode_drafts, tensors=1)


@dataclass(frozen=True)
class ShortConvSettings:
    """Sizes and options of a short convolution."""

    hidden: int
    kernel: int  # width of the convolution
    bias: bool  # whether both projections and the convolution have a bias

    def state_specs(self) -> list[TensorSpec]:
        """Return what one layer stores in a slot: the convolution's last inputs."""
        return [TensorSpec((self.kernel - 1, self.hidden), torch.float32)]

    def ring_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return what one layer keeps of a draft: the convolution's inputs."""
        return TensorSpec((self.hidden,), dtype)


class ShortConv(nn.Module):
    """A layer: in_proj → convolution between two gates → out_proj.

    index: the layer's number among the model's short convolutions, from 0, which is the number of its state tensor.
    Rows of in_proj in order: B, C, x. The convolution's inputs are B·x, and its results are multiplied by C.
    """

    def __init__(self, settings: ShortConvSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, 3 * s.hidden, s.bias, dtype)
        self.conv = Conv1d(s.hidden, s.kernel, s.bias, dtype)
        self.out_proj = Linear(s.hidden, s.hidden, s.bias, dtype)

    @cached_property
    def constants(self) -> ShortConvConstants:
        """Constants of the kernels, computed from the weights at first use. So the first use must be after loading."""
        return ShortConvConstants(*self.conv.taps_and_bias())

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden]; update the states."""
        output: Tensor = self.out_proj(step.mix(self.index, KERNELS, self.constants, self.in_proj(hidden)))
        return output

    def replay(self, step: BatchPlan) -> None:
        """Advance the states of decoding rows that feed nothing: replay their accepted drafts."""
        step.mix(self.index, KERNELS, self.constants, self.in_proj.nothing())
