"""The gated delta net (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import delta_decode, delta_decode_drafts
from baton.kernels.delta_net.prefill import delta_prefill
from baton.models.batch import TensorSpec
from baton.models.config import ModelError
from baton.models.layers.linear import Linear, rows_by_name
from baton.models.layers.mamba2 import Conv1d, GateNorm
from baton.models.layers.step import BatchPlan, MixKernels

KERNELS = MixKernels(delta_prefill, delta_decode, delta_decode_drafts)


@dataclass(frozen=True)
class DeltaSettings:
    """Sizes of a gated delta net."""

    hidden: int
    key_heads: int  # number of query and key heads; each serves the same number of value heads
    value_heads: int
    key_width: int  # numbers per head
    value_width: int
    kernel: int  # width of the convolution
    eps: float
    state_dtype: torch.dtype  # dtype of stored recurrent states; the computation is in float32
    beta_scale: float = 1.0  # factor of β: with 2, states can also change their sign

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"config.json: linear_num_value_heads = {self.value_heads} should be a multiple of "
                f"linear_num_key_heads = {self.key_heads}"
            )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.keys + self.inner

    @property
    def rows(self) -> dict[str, slice]:
        """The rows of in_proj that compute each of z, q, k, v, b and a."""
        sizes = {"z": self.inner, "q": self.keys, "k": self.keys, "v": self.inner}
        return rows_by_name(sizes | {"b": self.value_heads, "a": self.value_heads})

    def state_specs(self) -> list[TensorSpec]:
        """Return what one layer stores in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.value_heads, self.value_width, self.key_width), self.state_dtype),
        ]

    def ring_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return what one layer's ring stores for each draft: q, k and v before the convolution, b and a."""
        return TensorSpec((self.channels + 2 * self.value_heads,), dtype)


class DeltaMixer(nn.Module):
    """A layer: in_proj → convolution → gated delta rule → norm and gate → out_proj.

    index: the layer's number among the model's gated delta nets, from 0. Its state tensors are pools.state[2·index] and
    pools.state[2·index + 1].
    The rows of b and a, which compute β and the decay, are never quantized: their errors add up in the state.
    """

    def __init__(self, settings: DeltaSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, s.inner + s.channels + 2 * s.value_heads, False, dtype, 2 * s.value_heads)
        self.conv1d = Conv1d(s.channels, s.kernel, False, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.value_heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.value_heads, dtype=torch.float32))
        self.norm = GateNorm(s.value_width, dtype)
        self.out_proj = Linear(s.inner, s.hidden, False, dtype)

    @cached_property
    def constants(self) -> DeltaConstants:
        """Constants of the kernels, computed from the weights at first use. So the first use must be after loading."""
        taps, bias = self.conv1d.taps_and_bias()
        A, norm, s = -self.A_log.detach().exp(), self.norm.weight.detach().float(), self.settings
        return DeltaConstants(taps, bias, self.dt_bias.detach(), A, norm, s.key_heads, s.eps, s.beta_scale)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden]; update the states."""
        mixed = step.mix(self.index, KERNELS, self.constants, self.in_proj(hidden))
        output: Tensor = self.out_proj(mixed)
        return output

    def replay(self, step: BatchPlan) -> None:
        """Advance the states of decoding rows that feed nothing: replay their accepted drafts."""
        step.mix(self.index, KERNELS, self.constants, self.in_proj.nothing())
