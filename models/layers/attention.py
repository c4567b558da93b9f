"""Grouped-query attention over paged keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.kernels.activations import sigmoid_gate
from baton.kernels.attention.paged import paged_attention
from baton.kernels.attention.rotate_and_write import rotate_and_write
from baton.models.batch import TensorSpec
from baton.models.config import ModelError
from baton.models.layers.linear import Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan


@dataclass(frozen=True)
class AttentionSettings:
    """scale multiplies q·k. norm_eps: of queries and keys, where each head's are normed, by 1 + weight.

    gated: the output is multiplied by sigmoids.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    bias: bool
    norm_eps: float | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"config.json: {self.heads} attention heads cannot share {self.kv_heads} key heads evenly")

    def kv_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """What one layer keeps for a position: its keys and its values."""
        return [TensorSpec((self.kv_heads, self.head_dim), dtype)] * 2


class Attention(nn.Module):
    """`index` counts the model's attention layers: this one's pages are pools.pages[2·index] and the next."""

    def __init__(self, settings: AttentionSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.q_proj = Linear(s.hidden, s.heads * s.head_dim, s.bias, dtype)
        self.k_proj = Linear(s.hidden, s.kv_heads * s.head_dim, s.bias, dtype)
        self.v_proj = Linear(s.hidden, s.kv_heads * s.head_dim, s.bias, dtype)
        self.gate_proj = Linear(s.hidden, s.heads * s.head_dim, s.bias, dtype) if s.gated else None
        self.q_norm = None if s.norm_eps is None else RMSNorm(s.head_dim, s.norm_eps, dtype, offset=1.0)
        self.k_norm = None if s.norm_eps is None else RMSNorm(s.head_dim, s.norm_eps, dtype, offset=1.0)
        self.o_proj = Linear(s.heads * s.head_dim, s.hidden, s.bias, dtype)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """hidden: [T, hidden] → [T, hidden]; without step.rotation, positions are not encoded."""
        s, pages = self.settings, step.pages
        if pages is None:
            raise ValueError("an attention layer needs page tensors in the pools")
        key_pages, value_pages = step.pools.pages[2 * self.index : 2 * self.index + 2]
        query = self._heads(self.q_proj(hidden), self.q_norm)
        keys = self._heads(self.k_proj(hidden), self.k_norm)
        values = self._heads(self.v_proj(hidden), None)
        cos, sin = (step.rotation.cos, step.rotation.sin) if step.rotation else (None, None)
        query = rotate_and_write(query, keys, values, cos, sin, key_pages, value_pages, pages.places)
        layout = (pages.table, pages.offsets, pages.starts)
        attended = paged_attention(query, key_pages, value_pages, *layout, s.scale, pages.prompts, pages.longest)
        output = attended.flatten(1)
        if self.gate_proj:
            output = sigmoid_gate(output, self.gate_proj(hidden))
        projected: Tensor = self.o_proj(output)
        return projected

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """[T, heads · head_dim] → [T, heads, head_dim], each head normed."""
        heads = projected.view(-1, self.settings.head_dim)
        if norm:
            heads = norm(heads, None)[1]
        return heads.view(len(projected), -1, self.settings.head_dim)
