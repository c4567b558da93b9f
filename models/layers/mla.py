"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.kernels.activations import sigmoid_gate
from baton.kernels.attention.latents import attend_by_heads
from baton.kernels.attention.latents.sizes import Forms, forms_of
from baton.kernels.attention.mla_cache import write_latents
from baton.kernels.attention.paged import paged_attention
from baton.kernels.attention.rotary import rotate
from baton.models.batch import PagePlan, TensorSpec
from baton.models.layers.linear import HeadLinear, Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.spans import LongSegment, Span
from baton.models.layers.step import BatchPlan

EPS = 1e-6
"""The epsilon of the norms of latents. It does not depend on the model's rms_norm_eps."""


@dataclass(frozen=True)
class LatentSettings:
    """Sizes and options of latent attention.

    A head's key is made of `own` numbers, computed from a latent of `rank` numbers, and of `shared` numbers, which are
    the same for all heads.
    """

    hidden: int
    heads: int
    own: int
    shared: int
    value: int  # numbers of a head's value
    rank: int
    query_rank: int | None  # the size of the latent from which queries are computed; None: from hidden states
    bias: bool  # whether the projections to latents and the output projection have a bias
    gated: bool = False  # whether each head's output is multiplied by the sigmoid of a number of its own

    @property
    def stored(self) -> int:
        """Numbers that a layer stores per position."""
        return self.rank + self.shared

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float((self.own + self.shared) ** -0.5)

    def kv_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Return what one layer stores per position: a latent and a shared key.

        Kimi-Linear-48B-A3B: 576 numbers, 1,152 bytes in bfloat16; its heads' keys and values would take 20,480 bytes.
        """
        return [TensorSpec((1, self.stored), dtype)]

    def forms(self) -> Forms | None:
        """Return the limits that choose the form in which a GPU computes a segment; None: always the absorbed form."""
        return forms_of(self.rank, self.own, self.shared, self.value)


class LatentAttention(nn.Module):
    """A layer of latent attention. All heads attend to the same key at each position: the latent and the shared key.

    The latent is also the value. For a query q and a latent c, q·(W·c) = (Wᵀ·q)·c. So W, the projection from latents to
    a head's keys, is applied to the queries instead (k_b_proj). The projection to values is applied to the output of
    attention (v_b_proj). This is the absorbed form.
    For a long prompt it is more arithmetic than computing each head's keys and values; for decoding it reads far less
    memory. On a GPU, long segments are therefore computed by heads. The choice depends only on the number of a
    segment's own tokens. On a CPU, prompts are computed in the same way as decoding, so that a token's bits do not
    depend on how many tokens are in its batch.
    index: the layer's number among the model's attention layers, from 0. Its latents are in pools.pages[index].
    """

    def __init__(self, settings: LatentSettings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        s = self.settings = settings
        self.index = index
        queries = s.heads * (s.own + s.shared)
        if s.query_rank is None:
            self.q_proj = Linear(s.hidden, queries, False, dtype)
        else:
            self.q_a_proj = Linear(s.hidden, s.query_rank, s.bias, dtype)
            self.q_a_layernorm = RMSNorm(s.query_rank, EPS, dtype)
            self.q_b_proj = Linear(s.query_rank, queries, False, dtype)
        self.kv_a_proj_with_mqa = Linear(s.hidden, s.stored, s.bias, dtype)
        self.kv_a_layernorm = RMSNorm(s.rank, EPS, dtype)
        self.k_b_proj = HeadLinear(s.heads, s.own, s.rank, dtype)
        self.v_b_proj = HeadLinear(s.heads, s.rank, s.value, dtype)
        self.g_proj = Linear(s.hidden, s.heads, False, dtype, s.heads) if s.gated else None  # never quantized
        self.o_proj = Linear(s.heads * s.value, s.hidden, s.bias, dtype)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for hidden [tokens, hidden]; write the latents to the pages.

        Without step.rotations, positions are not encoded. With it, the shared part of keys and queries is rotated.
        """
        s, pages = self.settings, step.pages
        if pages is None:
            raise ValueError("an attention layer needs page tensors in the pools")
        latents, norm = step.pools.pages[self.index], self.kv_a_layernorm
        stored = self.kv_a_proj_with_mqa(hidden)
        queries = self._queries(hidden).view(len(hidden), s.heads, s.own + s.shared)
        if step.rotations:
            [turn] = step.rotations
            stored = rotate(stored[:, None], turn.cos, turn.sin, s.rank)[:, 0]
            queries = rotate(queries, turn.cos, turn.sin, s.own)
        write_latents(stored, norm.weight, norm.eps, latents, pages.places)
        parts = () if self.k_b_proj.packed or self.v_b_proj.packed else step.parts
        attended = self._in_parts(queries, latents, pages, parts) if parts else self._absorbed(queries, latents, pages)
        output = attended.flatten(1)
        if self.g_proj:
            output = sigmoid_gate(output, self.g_proj(hidden))
        projected: Tensor = self.o_proj(output)
        return projected

    def _absorbed(self, queries: Tensor, latents: Tensor, pages: PagePlan) -> Tensor:
        """Return the attention [tokens, heads, value] of all segments of `pages`, in the absorbed form."""
        s = self.settings
        query = self.k_b_proj(queries, s.shared)
        layout, values = (pages.table, pages.offsets, pages.starts), latents[..., : s.rank]
        attended = paged_attention(query, latents, values, *layout, s.scale, pages.prompts, pages.longest)
        projected: Tensor = self.v_b_proj(attended)
        return projected

    def _in_parts(
        self, queries: Tensor, latents: Tensor, pages: PagePlan, parts: Sequence[LongSegment | Span]
    ) -> Tensor:
        """Return the attention [tokens, heads, value] of a batch that is divided into parts."""
        s = self.settings
        weights, attended = (self.k_b_proj.weight, self.v_b_proj.weight), queries.new_empty(*queries.shape[:2], s.value)
        for part in parts:
            if isinstance(part, Span):
                rows = slice(part.first, part.stop)
                attended[rows] = self._absorbed(queries[rows], latents, part.pages)
            else:
                place = (part.first, part.length, part.start)
                attend_by_heads(queries, latents, pages.table[part.index], *weights, s.scale, *place, attended)
        return attended

    def _queries(self, hidden: Tensor) -> Tensor:
        if self.settings.query_rank is not None:
            normed = self.q_a_layernorm(self.q_a_proj(hidden), None)[1]
            queries: Tensor = self.q_b_proj(normed)
        else:
            queries = self.q_proj(hidden)
        return queries
