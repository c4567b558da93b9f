"""Cases for gated delta nets of real and odd shapes: prefill and decode between the projections, and the rule alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import triton as decoding
from baton.kernels.delta_net.prefill import triton as prefilling
from baton.kernels.delta_net.rule import triton, triton_update
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from tests.kernels.gpu.shapes.mamba2 import drafts_of

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class NetShape:
    key_heads: int
    heads: int
    size: int
    width: int
    kernel: int = 4
    beta_scale: float = 1.0

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.key_heads * self.size

    def constants(self) -> DeltaConstants:
        return DeltaConstants(
            taps=_meta(self.kernel, self.channels),
            conv_bias=None,
            dt_bias=_meta(self.heads),
            A=_meta(self.heads),
            norm=_meta(self.width),
            key_heads=self.key_heads,
            eps=1e-6,
            beta_scale=self.beta_scale,
        )

    def projected(self, rows: int, dtype: torch.dtype) -> Tensor:
        return _meta(rows, self.inner + self.channels + 2 * self.heads).to(dtype)

    def pools(self, slots: int, states: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the convolution pool and the state pool of one layer: views of slots that hold two layers."""
        conv, state = (self.kernel - 1) * self.channels, self.inner * self.size * states.itemsize // 4
        memory = torch.empty(slots, 2, conv + state, device="meta")[:, 1]
        conv_pool = memory[:, :conv].unflatten(1, (self.kernel - 1, self.channels))
        return conv_pool, memory[:, conv:].view(states).unflatten(1, (self.heads, self.width, self.size))

    def plan(self) -> PrefillPlan:
        return plan_prefill([0, 200, 201], [64, 0], [2, 0], [(0, 100, 1)], 64, self.kernel, torch.device("meta"))


NETS = {
    "qwen3-next-80b": NetShape(16, 32, 128, 128),
    "qwen3.5-397b": NetShape(16, 64, 128, 128),
    "olmo-hybrid-7b": NetShape(30, 30, 96, 192, beta_scale=2.0),
    "odd": NetShape(2, 6, 24, 20, 3),
    "wide and odd": NetShape(1, 2, 256, 40),
}


def prefill(s: NetShape, dtype: torch.dtype, states: torch.dtype) -> None:
    plan = s.plan()
    prefilling.delta_prefill(s.projected(plan.tokens, dtype), s.constants(), *s.pools(9, states), plan)


def decode(s: NetShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    decoding.delta_decode(s.projected(5, dtype), s.constants(), *s.pools(9, states), index, index)


def decode_drafts(s: NetShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index, ring = torch.empty(5, dtype=torch.int64, device="meta"), _meta(6, 8, s.channels + 2 * s.heads).to(dtype)
    pools, drafts = s.pools(9, states), drafts_of(5)
    decoding.delta_decode_drafts(s.projected(13, dtype), s.constants(), *pools, index, index, drafts, ring)


def bare(s: NetShape) -> None:
    """Run the delta rule alone, on prepared inputs (A is None); the update writes states to `targets`."""
    plan, (_, pool), index = s.plan(), s.pools(9, F32), torch.empty(5, dtype=torch.int64, device="meta")
    for rows in (plan.tokens, 5):
        q, v, g = _meta(rows, s.key_heads, s.size), _meta(rows, s.heads, s.width), _meta(rows, s.heads)
        if rows == 5:
            triton_update.delta_update(q, q, v, g, g, pool, index, index, targets=index)
        else:
            triton.delta_scan(q, q, v, g, g, pool, plan.table)


CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{run.__name__} {name} {dtype} {states}", partial(run, shape, dtype, states))
        for run in (prefill, decode, decode_drafts)
        for name, shape in NETS.items()
        for dtype, states in [(BF16, F32), (F32, F32), (BF16, BF16)]
    ),
    *((f"bare {name}", partial(bare, shape)) for name, shape in NETS.items()),
]


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")
