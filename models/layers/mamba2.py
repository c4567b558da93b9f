"""The Mamba-2 mixer (Dao and Gu, 2024, arXiv:2405.21060)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import mixer_decode, mixer_decode_drafts
from baton.kernels.mamba2.prefill import mixer_prefill
from baton.models.batch import TensorSpec
from baton.models.config import ModelConfig, ModelError
from baton.models.layers.linear import Linear
from baton.models.layers.step import BatchPlan, MixKernels

KERNELS = MixKernels(mixer_prefill, mixer_decode, mixer_decode_drafts)


@dataclass(frozen=True)
class Mamba2Settings:
    """Sizes and options of a Mamba-2 mixer."""

    hidden: int
    heads: int
    width: int  # numbers per head
    groups: int  # number of groups of heads; the heads of a group share B and C
    state: int  # the size of B and C
    kernel: int  # width of the convolution
    eps: float
    dt_limits: tuple[float, float]  # dt is clamped to this range
    bias: bool  # whether in_proj has a bias, and out_proj unless out_bias is given
    conv_bias: bool
    state_dtype: torch.dtype  # dtype of stored recurrent states; the computation is in float32
    out_bias: bool | None = None  # whether out_proj has a bias; None: the same as `bias`
    normed: bool = True  # whether there is a norm in addition to the gate
    norm_before_gate: bool = False

    @classmethod
    def from_config(
        cls, config: ModelConfig, state_dtype: torch.dtype, *, eps: float, inner: int | None = None
    ) -> "Mamba2Settings":
        """Read the keys that hybrid models have for a mixer (mamba_n_heads, mamba_d_state, …).

        eps: the default of rms_norm_eps.
        inner: what heads · width must be, else ModelError is raised; None stands for mamba_expand · hidden_size.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads", default=128)
        if inner is None:
            inner = config.integer("mamba_expand", default=2) * hidden
        automatic = config.values.get("mamba_d_head", "auto") == "auto"
        settings = cls(
            hidden=hidden,
            heads=heads,
            width=inner // heads if automatic else config.integer("mamba_d_head"),
            groups=config.integer("mamba_n_groups", default=1),
            state=config.integer("mamba_d_state", default=256),
            kernel=config.integer("mamba_d_conv", default=4),
            eps=config.number("rms_norm_eps", default=eps),
            dt_limits=config.limits("time_step_limit"),
            bias=config.flag("mamba_proj_bias", default=False),
            conv_bias=config.flag("mamba_conv_bias", default=True),
            state_dtype=state_dtype,
        )
        if settings.inner != inner:
            raise ModelError(
                f"config.json: mamba_n_heads · mamba_d_head = {settings.inner}, but the inner size is {inner}"
            )
        return settings

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(f"config.json: {self.heads} Mamba-2 heads cannot share {self.groups} groups evenly")

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def state_specs(self) -> list[TensorSpec]:
        """Return what one layer stores in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.heads, self.width, self.state), self.state_dtype),
        ]

    def ring_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return what one layer keeps of a draft: x, B and C before the convolution, and dt."""
        return TensorSpec((self.channels + self.heads,), dtype)


class Conv1d(nn.Module):
    """Weights of the depthwise convolution, [channels, 1, kernel] as in checkpoints; kernel: its width."""

    def __init__(self, channels: int, kernel: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype)) if bias else None

    def taps_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights as float32 [kernel, channels] and the bias as float32 [channels]."""
        taps = self.weight.detach()[:, 0].t().contiguous().float()
        return taps, None if self.bias is None else self.bias.detach().float()


class GateNorm(nn.Module):
    """Weight of the gated norm."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))


class Mamba2Mixer(nn.Module):
    """A layer: in_proj → convolution → recurrence → gate and norm → out_proj.

    index: the layer's number among the model's Mamba-2 layers, from 0. Its state tensors are pools.state[2·index] and
    pools.state[2·index + 1].
    Rows of in_proj in order: z (inner), x (inner), B (groups·state), C (groups·state), dt (heads). The rows
    of dt, which decide the decay, are never quantized: their errors add up in the state.
    """

    def __init__(self, settings: Mamba2Settings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, s.inner + s.channels + s.heads, s.bias, dtype, s.heads)
        self.conv1d = Conv1d(s.channels, s.kernel, s.conv_bias, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.norm = GateNorm(s.inner, dtype) if s.normed else None
        self.out_proj = Linear(s.inner, s.hidden, s.bias if s.out_bias is None else s.out_bias, dtype)

    @cached_property
    def constants(self) -> MixerConstants:
        """Constants of the kernels, computed from the weights at first use. So the first use must be after loading."""
        taps, bias = self.conv1d.taps_and_bias()
        norm, s = None if self.norm is None else self.norm.weight.detach().float(), self.settings
        A, dt_bias, D = -self.A_log.detach().exp(), self.dt_bias.detach(), self.D.detach()
        return MixerConstants(taps, bias, dt_bias, A, D, norm, s.groups, s.eps, s.dt_limits, s.norm_before_gate)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden]; update the states."""
        mixed = step.mix(self.index, KERNELS, self.constants, self.in_proj(hidden))
        output: Tensor = self.out_proj(mixed)
        return output

    def replay(self, step: BatchPlan) -> None:
        """Advance the states of decoding rows that feed nothing: replay their accepted drafts."""
        step.mix(self.index, KERNELS, self.constants, self.in_proj.nothing())
