"""What every layer of a step needs to know about it, worked out once."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels.mixer_prefill import PrefillPlan, plan_prefill
from models.batch import Batch, Pools


@dataclass(frozen=True)
class PagePlan:
    """Segments of attention: the prefill's, then one of one token for each decode row.

    places: int64 [T], where each token's keys and values go, page · page_size + offset.
    """

    offsets: list[int]
    starts: list[int]
    table: Tensor
    places: Tensor


@dataclass(frozen=True)
class BatchPlan:
    """A batch split for the mixers: its first `prefilled` tokens by segments, the rest a token a row."""

    pools: Pools
    prefilled: int
    prefill: PrefillPlan | None
    slots: Tensor | None
    pages: PagePlan | None


def plan_batch(batch: Batch, pools: Pools, chunk_size: int, kernel: int) -> BatchPlan:
    """chunk_size and kernel (the convolution's width) are the model's."""
    prefill, decode, device = batch.prefill, batch.decode, batch.tokens.device
    plan = None
    if prefill:
        wanted = [(c.segment, c.position, c.slot) for c in prefill.checkpoints]
        plan = plan_prefill(prefill.offsets, prefill.starts, prefill.slots, wanted, chunk_size, kernel, device)
    return BatchPlan(
        pools,
        prefill.offsets[-1] if prefill else 0,
        plan,
        decode.slots if decode else None,
        _plan_pages(batch, pools.page_size) if pools.pages else None,
    )


def _plan_pages(batch: Batch, page_size: int) -> PagePlan:
    offsets, starts, tables = [0], list[int](), list[Tensor]()
    if batch.prefill:
        offsets, starts = list(batch.prefill.offsets), list(batch.prefill.starts)
        tables.append(batch.prefill.page_table)
    if batch.decode:
        rows = len(batch.decode.slots)
        offsets += range(offsets[-1] + 1, offsets[-1] + 1 + rows)
        starts += cast(list[int], batch.decode.positions.tolist())
        tables.append(batch.decode.page_table)
    table = _stack(tables)
    lengths = torch.tensor(offsets, device=table.device).diff()
    segment = torch.repeat_interleave(torch.arange(len(starts), device=table.device), lengths)
    page = table[segment, batch.positions // page_size].long()
    return PagePlan(offsets, starts, table, page * page_size + batch.positions % page_size)


def _stack(tables: list[Tensor]) -> Tensor:
    """One table of all segments, as wide as the widest; what fills the narrower ones is never read."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
