"""The sizes of Mamba-2 mixers in models, and odd ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.mamba2.constants import MixerConstants


@dataclass(frozen=True)
class MixerShape:
    """The shape of a Mamba-2 mixer. groups: number of groups of B and C, and of the norm."""

    heads: int
    width: int
    groups: int
    state: int
    kernel: int = 4
    normed: bool = True
    norm_before_gate: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def constants(self) -> MixerConstants:
        return MixerConstants(
            taps=_meta(self.kernel, self.channels),
            conv_bias=_meta(self.channels),
            dt_bias=_meta(self.heads),
            A=_meta(self.heads),
            D=_meta(self.heads),
            norm=_meta(self.inner) if self.normed else None,
            norm_groups=self.groups,
            eps=1e-5,
            dt_limits=(0.0, float("inf")),
            norm_before_gate=self.norm_before_gate,
        )

    def projected(self, rows: int, dtype: torch.dtype) -> Tensor:
        return _meta(rows, self.inner + self.channels + self.heads).to(dtype)

    def pools(self, slots: int, states: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the convolution pool and the state pool of one layer: views of slots that hold two layers."""
        conv, state = (self.kernel - 1) * self.channels, self.inner * self.state * states.itemsize // 4
        memory = torch.empty(slots, 2, conv + state, device="meta")[:, 1]
        conv_pool = memory[:, :conv].unflatten(1, (self.kernel - 1, self.channels))
        return conv_pool, memory[:, conv:].view(states).unflatten(1, (self.heads, self.width, self.state))


def drafts_of(rows: int) -> Drafts:
    """Return Drafts of rows that compute 4 tokens each."""
    bounds = torch.empty(rows + 1, dtype=torch.int64, device="meta")
    return Drafts(bounds, bounds, bounds[:rows], 4 * rows, 8)


SHAPES = {
    "mamba2-130m": MixerShape(24, 64, 1, 128),
    "mamba2-2.7b": MixerShape(80, 64, 1, 128),
    "codestral-7b": MixerShape(128, 64, 8, 128),
    "nemotron-h-8b": MixerShape(128, 64, 8, 128),
    "granite-4-h-small": MixerShape(128, 64, 1, 128),
    "falcon-h1-0.5b": MixerShape(24, 64, 1, 128, normed=False),
    "nemotron-nano-9b-v2": MixerShape(128, 80, 8, 128),
    "falcon-h1-34b": MixerShape(32, 128, 2, 256),
    "odd": MixerShape(6, 20, 2, 24, 3, norm_before_gate=True),
}


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")
