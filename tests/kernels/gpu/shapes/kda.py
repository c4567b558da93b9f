"""Cases for Kimi Delta Attention of real and odd shapes: prefill and decode between projections, and the rule alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import KdaConstants
from baton.kernels.delta_net.decode import triton as decoding
from baton.kernels.delta_net.prefill import triton as prefilling
from baton.kernels.delta_net.rule import triton, triton_update
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from tests.kernels.gpu.shapes.mamba2 import drafts_of

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class KdaShape:
    heads: int
    size: int
    width: int
    kernel: int = 4
    lower_bound: float | None = None

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.size + self.width)

    def constants(self) -> KdaConstants:
        taps, dt_bias = _meta(self.kernel, self.channels), _meta(self.heads * self.size)
        return KdaConstants(taps, dt_bias, _meta(self.heads), _meta(self.width), 1e-6, self.lower_bound)

    def projected(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return `projected` (a slice of a wider projection), `forget` and `gate`."""
        wide = _meta(rows, self.channels + self.heads + 2 * self.width).to(dtype)
        forget, gate = _meta(rows, self.heads * self.size), _meta(rows, self.heads * self.width)
        return wide[:, : self.channels + self.heads], forget.to(dtype), gate.to(dtype)

    def pools(self, slots: int, states: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the convolution pool and the state pool of one layer: views of slots that hold two layers."""
        inner = self.heads * self.width
        conv, state = (self.kernel - 1) * self.channels, inner * self.size * states.itemsize // 4
        memory = torch.empty(slots, 2, conv + state, device="meta")[:, 1]
        conv_pool = memory[:, :conv].unflatten(1, (self.kernel - 1, self.channels))
        return conv_pool, memory[:, conv:].view(states).unflatten(1, (self.heads, self.width, self.size))

    def plan(self) -> PrefillPlan:
        return plan_prefill([0, 200, 201], [64, 0], [2, 0], [(0, 100, 1)], 64, self.kernel, torch.device("meta"))


KDAS = {
    "kimi-linear-48b": KdaShape(32, 128, 128),
    "ling-3.0-flash": KdaShape(32, 128, 128, lower_bound=-5.0),
    "odd": KdaShape(6, 24, 20, 3),
    "wide and odd": KdaShape(2, 256, 40),
}


def prefill(s: KdaShape, dtype: torch.dtype, states: torch.dtype) -> None:
    plan = s.plan()
    prefilling.kda_prefill(*s.projected(plan.tokens, dtype), s.constants(), *s.pools(9, states), plan)


def decode(s: KdaShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    decoding.kda_decode(*s.projected(5, dtype), s.constants(), *s.pools(9, states), index, index)


def decode_drafts(s: KdaShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index, columns = torch.empty(5, dtype=torch.int64, device="meta"), s.channels + s.heads * (1 + s.size)
    pools, drafts, ring = s.pools(9, states), drafts_of(5), _meta(6, 8, columns).to(dtype)
    decoding.kda_decode_drafts(*s.projected(13, dtype), s.constants(), *pools, index, index, drafts, ring)


def bare(s: KdaShape) -> None:
    """Run the delta rule alone, on prepared inputs (A is None)."""
    plan, (_, pool), index = s.plan(), s.pools(9, F32), torch.empty(5, dtype=torch.int64, device="meta")
    for rows in (plan.tokens, 5):
        q, v, beta = _meta(rows, s.heads, s.size), _meta(rows, s.heads, s.width), _meta(rows, s.heads)
        if rows == 5:
            triton_update.delta_update(q, q, v, q, beta, pool, index, index)
        else:
            triton.delta_scan(q, q, v, q, beta, pool, plan.table)


CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{run.__name__} {name} {dtype} {states}", partial(run, shape, dtype, states))
        for run in (prefill, decode, decode_drafts)
        for name, shape in KDAS.items()
        for dtype, states in [(BF16, F32), (F32, F32), (BF16, BF16)]
    ),
    *((f"bare {name}", partial(bare, shape)) for name, shape in KDAS.items()),
]


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")
