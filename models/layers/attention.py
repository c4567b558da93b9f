"""Grouped-query attention over paged keys and values.

Pages before the window of a layer are kept, because prefixes in the cache share them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.kernels.activations import sigmoid_gate
from baton.kernels.attention.paged import paged_attention, write_pages
from baton.kernels.attention.rotary import rotate
from baton.kernels.attention.rotate_and_write import rotate_and_write
from baton.models.batch import TensorSpec
from baton.models.config import ModelConfig, ModelError
from baton.models.layers.linear import Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan


@dataclass(frozen=True)
class AttentionSettings:
    """Sizes and options of an attention layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the products q·k
    bias: bool  # whether the projections have a bias
    norm_eps: float | None = None  # epsilon of the norms of queries and keys; None: no norms
    norm_offset: float = 1.0  # added to the weights of these norms
    norm_together: bool = False  # whether these norms are over all heads together, not over each head
    gates: int = 0  # size of a further projection, whose sigmoid multiplies the output: 0, heads or heads · head_dim
    gate_bias: bool = False  # whether this projection has a bias
    seen_from: int = 0  # the first position that tokens attend to
    window: int = 0  # how many positions a token attends to, its own included; 0: all
    rotation: int = 0  # which of the model's rotations encodes positions

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        *,
        head_dim: tuple[str, ...] = ("head_dim",),
        scale: float | None = None,
        norm_eps: float | None = None,
        norm_offset: float = 1.0,
        norm_together: bool = False,
        gated: bool = False,
    ) -> "AttentionSettings":
        """Read the sizes, which all families name alike.

        head_dim: config.json's keys for the width of a head; the default width is hidden_size / num_attention_heads.
        scale: the factor of q·k; None stands for 1 / √head_dim.
        gated: whether a projection has a gate for each number of the output.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        width, bias = config.integer(*head_dim, default=hidden // heads), config.flag("attention_bias", default=False)
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=config.integer("num_key_value_heads", default=heads),
            head_dim=width,
            scale=width**-0.5 if scale is None else scale,
            bias=bias,
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            norm_together=norm_together,
            gates=heads * width if gated else 0,
            gate_bias=gated and bias,
        )

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads = {self.heads} should be a multiple of "
                f"num_key_value_heads = {self.kv_heads}"
            )

    def kv_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Return what one layer stores per position: its keys and its values."""
        return [TensorSpec((self.kv_heads, self.head_dim), dtype)] * 2


class Attention(nn.Module):
    """A layer of grouped-query attention.

    index: the layer's number among the model's attention layers, from 0. Its keys are in pools.pages[2·index], and its
    values in pools.pages[2·index + 1].
    """

    def __init__(self, settings: AttentionSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        self.q_proj = Linear(s.hidden, s.heads * s.head_dim, s.bias, dtype)
        self.k_proj = Linear(s.hidden, s.kv_heads * s.head_dim, s.bias, dtype)
        self.v_proj = Linear(s.hidden, s.kv_heads * s.head_dim, s.bias, dtype)
        self.gate_proj = Linear(s.hidden, s.gates, s.gate_bias, dtype, s.gates) if s.gates else None  # never quantized
        self.q_norm, self.k_norm = self._norm(s.heads, dtype), self._norm(s.kv_heads, dtype)
        self.o_proj = Linear(s.heads * s.head_dim, s.hidden, s.bias, dtype)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden].

        Without step.rotations, positions are not encoded.
        """
        s, pages = self.settings, step.pages
        if pages is None:
            raise ValueError("an attention layer needs page tensors in the pools")
        key_pages, value_pages = self._pages(step)
        query = self._heads(self.q_proj(hidden), self.q_norm)
        keys, values = self._keys_and_values(hidden)
        cos, sin = step.rotations[s.rotation] if step.rotations else (None, None)
        query = rotate_and_write(query, keys, values, cos, sin, key_pages, value_pages, pages.places)
        layout = (pages.table, pages.offsets, pages.starts)
        sizes = pages.prompts, pages.longest, s.seen_from, s.window
        attended = paged_attention(query, key_pages, value_pages, *layout, s.scale, *sizes)
        output = attended.flatten(1)
        if self.gate_proj:
            output = sigmoid_gate(output, self.gate_proj(hidden))
        projected: Tensor = self.o_proj(output)
        return projected

    def write(self, hidden: Tensor, step: BatchPlan) -> None:
        """Write the keys and values of tokens whose output is not needed. hidden: [tokens, hidden]."""
        if step.pages is None:
            raise ValueError("an attention layer needs page tensors in the pools")
        keys, values = self._keys_and_values(hidden)
        if step.rotations:
            keys = rotate(keys, *step.rotations[self.settings.rotation])
        write_pages(keys, values, *self._pages(step), step.pages.places)

    def _norm(self, heads: int, dtype: torch.dtype) -> RMSNorm | None:
        s = self.settings
        width = s.head_dim * (heads if s.norm_together else 1)
        return None if s.norm_eps is None else RMSNorm(width, s.norm_eps, dtype, s.norm_offset)

    def _pages(self, step: BatchPlan) -> tuple[Tensor, Tensor]:
        keys, values = step.pools.pages[2 * self.index : 2 * self.index + 2]
        return keys, values

    def _keys_and_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(self.k_proj(hidden), self.k_norm), self._heads(self.v_proj(hidden), None)

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """Norm [tokens, heads · head_dim], each head or all together, and split it into [tokens, heads, head_dim]."""
        normed = norm(projected.view(-1, len(norm.weight)), None)[1] if norm else projected
        return normed.view(len(projected), -1, self.settings.head_dim)
