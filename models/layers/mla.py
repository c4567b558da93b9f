"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), without positions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.kernels.attention.mla_cache import write_latents
from baton.kernels.attention.paged import paged_attention
from baton.models.batch import TensorSpec
from baton.models.layers.linear import HeadLinear, Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan

EPS = 1e-6
"""Of the norms of latents, whatever the model's is."""


@dataclass(frozen=True)
class LatentSettings:
    """Of a key, `own` numbers are its head's, made of a latent of size `rank`, and `shared` are the same for all heads.

    value: the size of a value; query_rank: that of the latent that queries are made from, None for hidden states.
    bias: of what makes latents, and of the output.
    """

    hidden: int
    heads: int
    own: int
    shared: int
    value: int
    rank: int
    query_rank: int | None
    bias: bool

    @property
    def kept(self) -> int:
        return self.rank + self.shared

    def kv_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """What one layer keeps for a position: a latent and a shared key.

        Kimi-Linear-48B-A3B: 576 numbers, 1,152 bytes in bfloat16; its heads' keys and values would be 20,480.
        """
        return [TensorSpec((1, self.kept), dtype)]


class LatentAttention(nn.Module):
    """Attention of all heads to one key a position: the latent, which is also its value, and the shared key behind it.

    Since q·(W·c) = (Wᵀ·q)·c, what would make a head's keys of latents is applied to its queries instead (k_b_proj),
    and what would make its values to what it has attended to (v_b_proj).
    For a long prompt that is more arithmetic than keys and values of each head would be, and for decoding far less
    memory to read; both are done alike, for no token's bits may depend on how many are read beside it.
    `index` counts the model's attention layers: this one's pages are pools.pages[index].
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
        self.kv_a_proj_with_mqa = Linear(s.hidden, s.kept, s.bias, dtype)
        self.kv_a_layernorm = RMSNorm(s.rank, EPS, dtype)
        self.k_b_proj = HeadLinear(s.heads, s.own, s.rank, dtype)
        self.v_b_proj = HeadLinear(s.heads, s.rank, s.value, dtype)
        self.o_proj = Linear(s.heads * s.value, s.hidden, s.bias, dtype)

    def forward(self, hidden: Tensor, step: BatchPlan) -> Tensor:
        """hidden: [T, hidden] → [T, hidden]."""
        s, pages = self.settings, step.pages
        if pages is None:
            raise ValueError("an attention layer needs page tensors in the pools")
        kept, norm = step.pools.pages[self.index], self.kv_a_layernorm
        write_latents(self.kv_a_proj_with_mqa(hidden), norm.weight, norm.eps, kept, pages.places)
        query = self.k_b_proj(self._queries(hidden).view(len(hidden), s.heads, s.own + s.shared), s.shared)
        layout, scale = (pages.table, pages.offsets, pages.starts), (s.own + s.shared) ** -0.5
        attended = paged_attention(query, kept, kept[..., : s.rank], *layout, scale, pages.prompts, pages.longest)
        projected: Tensor = self.o_proj(self.v_b_proj(attended).flatten(1))
        return projected

    def _queries(self, hidden: Tensor) -> Tensor:
        if self.settings.query_rank is not None:
            normed = self.q_a_layernorm(self.q_a_proj(hidden), None)[1]
            queries: Tensor = self.q_b_proj(normed)
        else:
            queries = self.q_proj(hidden)
        return queries
