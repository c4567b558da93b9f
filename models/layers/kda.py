"""Kimi Delta Attention (Kimi Team, 2025, arXiv:2510.26692)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from baton.kernels.delta_net.constants import KdaConstants
from baton.kernels.delta_net.decode import kda_decode, kda_decode_drafts
from baton.kernels.delta_net.prefill import kda_prefill
from baton.models.batch import TensorSpec
from baton.models.layers.linear import Linear, rows_by_name
from baton.models.layers.mamba2 import Conv1d, GateNorm
from baton.models.layers.step import BatchPlan, MixKernels

KERNELS = MixKernels(kda_prefill, kda_decode, kda_decode_drafts)


@dataclass(frozen=True)
class KdaSettings:
    """Sizes of a layer of Kimi Delta Attention."""

    hidden: int
    heads: int  # the same number for queries, keys and values
    width: int  # numbers per head
    kernel: int  # width of the convolution
    eps: float
    state_dtype: torch.dtype  # dtype of stored recurrent states; the computation is in float32
    full_rank: bool = False  # whether one projection, not two of low rank, computes the decay's input, and one the gate
    lower_bound: float | None = None  # the lower bound of log decays; None: unbounded, A·softplus

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 3 * self.inner

    @property
    def rows(self) -> dict[str, slice]:
        """The rows of in_proj that compute each of q, k, v and b, and g, the gate, or f_a and g_a.

        f_a and g_a have low rank: f_b_proj computes the decay from f_a, and g_b_proj computes the gate from g_a.
        """
        sizes = {"q": self.inner, "k": self.inner, "v": self.inner, "b": self.heads}
        if self.full_rank:
            return rows_by_name({"g": self.inner} | sizes)
        return rows_by_name(sizes | {"f_a": self.width, "g_a": self.width})

    def state_specs(self) -> list[TensorSpec]:
        """Return what one layer stores in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.heads, self.width, self.width), self.state_dtype),
        ]

    def ring_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return what one layer keeps of a draft: q, k and v before the convolution, b, and the decays' inputs."""
        return TensorSpec((self.channels + self.heads + self.inner,), dtype)


class KdaMixer(nn.Module):
    """A layer: in_proj → convolution → delta rule with a decay for each channel → norm and gate → o_proj.

    index: the layer's number among the model's KDA layers, from 0. Its state tensors are pools.state[2·index] and
    pools.state[2·index + 1].
    The projections that compute β and the decay, and those of low rank that compute the gate, are never quantized:
    errors of β and the decay add up in the state.
    """

    def __init__(self, settings: KdaSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        if s.full_rank:
            self.in_proj = Linear(s.hidden, s.inner + s.channels + s.heads, False, dtype, s.heads)
            self.f_proj = Linear(s.hidden, s.inner, False, dtype, s.inner)
        else:
            narrow = s.heads + 2 * s.width
            self.in_proj = Linear(s.hidden, s.channels + narrow, False, dtype, narrow)
            self.f_b_proj = Linear(s.width, s.inner, False, dtype, s.inner)
            self.g_b_proj = Linear(s.width, s.inner, False, dtype, s.inner)
        self.conv1d = Conv1d(s.channels, s.kernel, False, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.inner, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.o_norm = GateNorm(s.width, dtype)
        self.o_proj = Linear(s.inner, s.hidden, False, dtype)

    @cached_property
    def constants(self) -> KdaConstants:
        """Constants of the kernels, computed from the weights at first use. So the first use must be after loading."""
        taps, _ = self.conv1d.taps_and_bias()
        A, norm = -self.A_log.detach().exp(), self.o_norm.weight.detach().float()
        s = self.settings
        return KdaConstants(taps, self.dt_bias.detach(), A, norm, s.eps, s.lower_bound)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden]; update the states."""
        s, projected = self.settings, self.in_proj(hidden)
        if s.full_rank:
            gate, projected = projected.split([s.inner, s.channels + s.heads], dim=1)
            inputs = projected, self.f_proj(hidden), gate
        else:
            projected, f_a, g_a = projected.split([s.channels + s.heads, s.width, s.width], dim=1)
            inputs = projected, self.f_b_proj(f_a), self.g_b_proj(g_a)
        output: Tensor = self.o_proj(step.mix(self.index, KERNELS, self.constants, *inputs))
        return output

    def replay(self, step: BatchPlan) -> None:
        """Advance the states of decoding rows that feed nothing: replay their accepted drafts."""
        s, nothing = self.settings, self.in_proj.nothing()
        projected, wide = nothing[:, : s.channels + s.heads], nothing[:, : s.inner]
        step.mix(self.index, KERNELS, self.constants, projected, wide, wide)
