"""Kimi Delta Attention (Kimi Team, 2025, arXiv:2510.26692)."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from baton.kernels.delta_net.constants import KdaConstants
from baton.kernels.delta_net.decode import kda_decode
from baton.kernels.delta_net.prefill import kda_prefill
from baton.models.batch import TensorSpec
from baton.models.layers.linear import Linear
from baton.models.layers.mamba2 import Conv1d, GateNorm
from baton.models.layers.step import BatchPlan


@dataclass(frozen=True)
class KdaSettings:
    """`heads` of `width` numbers in queries, keys and values alike.

    state_dtype: in which recurrent states are kept; they are computed in float32.
    """

    hidden: int
    heads: int
    width: int
    kernel: int
    eps: float
    state_dtype: torch.dtype

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Those of the convolution: q, k and v."""
        return 3 * self.inner

    @property
    def rows(self) -> dict[str, slice]:
        """Those of in_proj, by what they project to; f_a and g_a: the narrow middles of the decay and of the gate."""
        sizes = {"q": self.inner, "k": self.inner, "v": self.inner, "b": self.heads, "f_a": self.width}
        sizes["g_a"] = self.width
        ends = accumulate(sizes.values())
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def state_specs(self) -> list[TensorSpec]:
        """What one layer keeps in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.heads, self.width, self.width), self.state_dtype),
        ]


class KdaMixer(nn.Module):
    """in_proj → convolution → delta rule with a decay for each channel → norm and gate → o_proj.

    `index` counts the model's layers of this kind: this one's state tensors are pools.state[2·index] and the next.
    """

    def __init__(self, settings: KdaSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, s.channels + s.heads + 2 * s.width, False, dtype)
        self.f_b_proj = Linear(s.width, s.inner, False, dtype)
        self.g_b_proj = Linear(s.width, s.inner, False, dtype)
        self.conv1d = Conv1d(s.channels, s.kernel, False, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.inner, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.heads, dtype=torch.float32))
        self.o_norm = GateNorm(s.width, dtype)
        self.o_proj = Linear(s.inner, s.hidden, False, dtype)

    @cached_property
    def constants(self) -> KdaConstants:
        """Worked out when first used; the model must have been loaded."""
        taps, _ = self.conv1d.taps_and_bias()
        A, norm = -self.A_log.detach().exp(), self.o_norm.weight.detach().float()
        return KdaConstants(taps, self.dt_bias.detach(), A, norm, self.settings.eps)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """hidden: [T, hidden] → [T, hidden]."""
        s, cut, mixed = self.settings, step.prefilled, list[Tensor]()
        conv_pool, state_pool = step.pools.state[2 * self.index : 2 * self.index + 2]
        projected, f_a, g_a = self.in_proj(hidden).split([s.channels + s.heads, s.width, s.width], dim=1)
        forget, gate = self.f_b_proj(f_a), self.g_b_proj(g_a)
        if step.prefill:
            given = projected[:cut], forget[:cut], gate[:cut]
            mixed.append(kda_prefill(*given, self.constants, conv_pool, state_pool, step.prefill))
        if rows := step.decode:
            given = projected[cut:], forget[cut:], gate[cut:]
            at = rows.slots, rows.positions
            mixed.append(kda_decode(*given, self.constants, conv_pool, state_pool, *at))
        output: Tensor = self.o_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        return output
