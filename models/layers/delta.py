"""The gated delta net."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import delta_decode
from baton.kernels.delta_net.prefill import delta_prefill
from baton.models.batch import TensorSpec
from baton.models.config import ModelError
from baton.models.layers.linear import Linear
from baton.models.layers.mamba2 import Conv1d, GateNorm
from baton.models.layers.step import BatchPlan


@dataclass(frozen=True)
class DeltaSettings:
    """Queries and keys of key_heads · key_width, values of value_heads · value_width; value heads share key heads.

    state_dtype: in which recurrent states are kept; they are computed in float32.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    eps: float
    state_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"config.json: {self.value_heads} value heads cannot share {self.key_heads} key heads evenly"
            )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Those of the convolution: q, k and v."""
        return 2 * self.keys + self.inner

    @property
    def rows(self) -> dict[str, slice]:
        """Those of in_proj, by what they project to."""
        sizes = {"z": self.inner, "q": self.keys, "k": self.keys, "v": self.inner}
        sizes |= {"b": self.value_heads, "a": self.value_heads}
        ends = accumulate(sizes.values())
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def state_specs(self) -> list[TensorSpec]:
        """What one layer keeps in a slot: the convolution's last inputs and the recurrent state."""
        return [
            TensorSpec((self.kernel - 1, self.channels), torch.float32),
            TensorSpec((self.value_heads, self.value_width, self.key_width), self.state_dtype),
        ]


class DeltaMixer(nn.Module):
    """in_proj → convolution → gated delta rule → norm and gate → out_proj.

    `index` counts the model's gated delta nets: this one's state tensors are pools.state[2·index] and the next.
    """

    def __init__(self, settings: DeltaSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.in_proj = Linear(s.hidden, s.inner + s.channels + 2 * s.value_heads, False, dtype)
        self.conv1d = Conv1d(s.channels, s.kernel, False, dtype)
        self.dt_bias = nn.Parameter(torch.empty(s.value_heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(s.value_heads, dtype=torch.float32))
        self.norm = GateNorm(s.value_width, dtype)
        self.out_proj = Linear(s.inner, s.hidden, False, dtype)

    @cached_property
    def constants(self) -> DeltaConstants:
        """Worked out when first used; the model must have been loaded."""
        taps, bias = self.conv1d.taps_and_bias()
        A, norm, s = -self.A_log.detach().exp(), self.norm.weight.detach().float(), self.settings
        return DeltaConstants(taps, bias, self.dt_bias.detach(), A, norm, s.key_heads, s.eps)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """hidden: [T, hidden] → [T, hidden]."""
        conv_pool, state_pool = step.pools.state[2 * self.index : 2 * self.index + 2]
        projected, cut, mixed = self.in_proj(hidden), step.prefilled, list[Tensor]()
        if step.prefill:
            mixed.append(delta_prefill(projected[:cut], self.constants, conv_pool, state_pool, step.prefill))
        if rows := step.decode:
            mixed.append(
                delta_decode(projected[cut:], self.constants, conv_pool, state_pool, rows.slots, rows.positions)
            )
        output: Tensor = self.out_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        return output
