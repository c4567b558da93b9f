"""The Mamba-2 mixer."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import mixer_decode
from baton.kernels.mamba2.prefill import mixer_prefill
from baton.models.batch import TensorSpec
from baton.models.config import ModelError
from baton.models.layers.linear import Linear
from baton.models.layers.step import BatchPlan


@dataclass(frozen=True)
class Mamba2Settings:
    """heads · width is the inner size; each of `groups` groups of heads shares its B and C of size `state`.

    bias: of in_proj, and of out_proj unless out_bias says otherwise. normed: whether there is a norm beside the gate.
    state_dtype: in which recurrent states are kept; they are computed in float32.
    """

    hidden: int
    heads: int
    width: int
    groups: int
    state: int
    kernel: int
    eps: float
    dt_limits: tuple[float, float]
    bias: bool
    conv_bias: bool
    state_dtype: torch.dtype
    out_bias: bool | None = None
    normed: bool = True
    norm_before_gate: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(f"config.json: {self.heads} Mamba-2 heads cannot share {self.groups} groups evenly")

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Those of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def state_specs(self) -> list[TensorSpec]:
        """What one layer keeps in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.heads, self.width, self.state), self.state_dtype),
        ]


class Conv1d(nn.Module):
    """Weights of the depthwise convolution, [channels, 1, K] as checkpoints have them."""

    def __init__(self, channels: int, kernel: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype)) if bias else None

    def taps_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """float32 [K, channels] and [channels]."""
        taps = self.weight.detach()[:, 0].t().contiguous().float()
        return taps, None if self.bias is None else self.bias.detach().float()


class GateNorm(nn.Module):
    """Weight of the gated norm."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))


class Mamba2Mixer(nn.Module):
    """in_proj → convolution → recurrence → gate and norm → out_proj.

    `index` counts the model's Mamba layers: this one's state tensors are pools.state[2·index] and the next.
    Rows of in_proj: z (inner), x (inner), B (groups·state), C (groups·state), dt (heads).
    """

    def __init__(self, settings: Mamba2Settings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, s.inner + s.channels + s.heads, s.bias, dtype)
        self.conv1d = Conv1d(s.channels, s.kernel, s.conv_bias, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.norm = GateNorm(s.inner, dtype) if s.normed else None
        self.out_proj = Linear(s.inner, s.hidden, s.bias if s.out_bias is None else s.out_bias, dtype)

    @cached_property
    def constants(self) -> MixerConstants:
        """Worked out when first used; the model must have been loaded."""
        taps, bias = self.conv1d.taps_and_bias()
        norm, s = None if self.norm is None else self.norm.weight.detach().float(), self.settings
        A, dt_bias, D = -self.A_log.detach().exp(), self.dt_bias.detach(), self.D.detach()
        return MixerConstants(taps, bias, dt_bias, A, D, norm, s.groups, s.eps, s.dt_limits, s.norm_before_gate)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """hidden: [T, hidden] → [T, hidden]."""
        conv_pool, state_pool = step.pools.state[2 * self.index : 2 * self.index + 2]
        projected, cut, mixed = self.in_proj(hidden), step.prefilled, list[Tensor]()
        if step.prefill:
            mixed.append(mixer_prefill(projected[:cut], self.constants, conv_pool, state_pool, step.prefill))
        if rows := step.decode:
            mixed.append(
                mixer_decode(projected[cut:], self.constants, conv_pool, state_pool, rows.slots, rows.positions)
            )
        output: Tensor = self.out_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        return output
