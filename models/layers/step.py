"""What every layer of a step needs to know about it, worked out once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import chunk_table, cut
from baton.kernels.prefill.plan import PrefillPlan
from baton.models.batch import Batch, Decode, PagePlan, Pools, Prefill
from baton.models.layers.rope import Rotation


@dataclass(frozen=True)
class BatchPlan:
    """A batch split for the mixers: its first `prefilled` tokens by segments, the rest a token a row."""

    pools: Pools
    prefilled: int
    prefill: PrefillPlan | None
    decode: Decode | None
    pages: PagePlan | None
    rotation: Rotation | None = None

    @property
    def padding(self) -> Tensor | None:
        """bool [T]: rows that are nobody's, in a step that only decodes; None: there are none."""
        return self.decode.padding if self.decode and not self.prefill else None


def plan_batch(
    batch: Batch, pools: Pools, chunk_size: int, kernel: int, rotate: Callable[[Tensor], Rotation] | None = None
) -> BatchPlan:
    """chunk_size and kernel (the convolution's width) are the model's; rotate: of positions, where it encodes them."""
    prefill, pages = batch.prefill, batch.pages
    if pools.pages and pages is None:
        only_rows = batch.decode if prefill is None else None
        pages = _plan_rows(only_rows, pools.page_size) if only_rows else _plan_pages(batch, pools.page_size)
    return BatchPlan(
        pools,
        prefill.offsets[-1] if prefill else 0,
        _plan_prefill(prefill, chunk_size, kernel, batch.tokens.device) if prefill else None,
        batch.decode,
        pages,
        rotate(batch.positions) if rotate else None,
    )


def _plan_prefill(prefill: Prefill, chunk_size: int, kernel: int, device: torch.device) -> PrefillPlan:
    given = (prefill.offsets, prefill.starts, prefill.slots, prefill.saved())
    table = prefill.table or chunk_table(cut(*given, chunk_size), device)
    return PrefillPlan(*given, kernel, table)


def _plan_pages(batch: Batch, page_size: int) -> PagePlan:
    offsets, starts, tables = [torch.zeros(1, dtype=torch.int64)], list[Tensor](), list[Tensor]()
    prompts, longest, device = 0, 0, batch.tokens.device
    if batch.prefill:
        offsets, starts = [torch.tensor(batch.prefill.offsets)], [torch.tensor(batch.prefill.starts)]
        tables.append(batch.prefill.page_table)
        prompts, longest = len(tables[0]), int(offsets[0].diff().max())
    if batch.decode:
        rows, first = len(batch.decode.slots), int(offsets[0][-1])
        offsets.append(torch.arange(first + 1, first + 1 + rows))
        starts.append(batch.decode.positions)
        tables.append(batch.decode.page_table)
    bounds, table = torch.cat(offsets), _stack(tables)
    segment = torch.repeat_interleave(torch.arange(len(table)), bounds.diff()).to(table.device)
    page = table[segment, batch.positions // page_size].long()
    places = page * page_size + batch.positions % page_size
    of_segments = torch.cat([start.to(device) for start in starts])
    return PagePlan(bounds.to(device), of_segments, table, places, prompts, longest)


def _plan_rows(rows: Decode, page_size: int) -> PagePlan:
    """_plan_pages of a batch that has nothing else: it is made anew for each token."""
    offsets = torch.arange(len(rows.slots) + 1, device=rows.slots.device)
    page = rows.page_table.gather(1, (rows.positions // page_size)[:, None])[:, 0].long()
    places = page * page_size + rows.positions % page_size
    return PagePlan(offsets, rows.positions, rows.page_table, places, 0, 0)


def _stack(tables: list[Tensor]) -> Tensor:
    """One table of all segments, as wide as the widest; what fills the narrower ones is never read."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
