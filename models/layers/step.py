"""The plan of a step: what every layer needs to know about the batch, computed once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.attention.latents.sizes import Forms
from baton.kernels.prefill.chunk_table import chunk_table, cut
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime.triton import takes
from baton.models.batch import Batch, Decode, PagePlan, Pools, Prefill
from baton.models.layers.rope import Rotation
from baton.models.layers.spans import LongSegment, Span, divide


@dataclass(frozen=True)
class BatchPlan:
    """A batch, divided into prompt tokens, in one segment per row, and the tokens of decoding rows, one per row."""

    pools: Pools
    prefilled: int  # the number of prompt tokens, which come first
    prefill: PrefillPlan | None
    decode: Decode | None
    pages: PagePlan | None
    rotation: Rotation | None = None  # None: positions are not encoded
    parts: Sequence[LongSegment | Span] = ()  # what latent attention computes apart; empty: everything together

    @property
    def padding(self) -> Tensor | None:
        """The mask of padding rows, bool [rows], in a step that only decodes; None if no row is padding."""
        return self.decode.padding if self.decode and not self.prefill else None

    def mix(
        self,
        index: int,
        prefill: Callable[..., Tensor],
        decode: Callable[..., Tensor],
        constants: object,
        *inputs: Tensor,
    ) -> Tensor:
        """Run a recurrent layer's kernels over the batch: `prefill` for prompts and `decode` for decoding rows.

        index: the layer's number among the model's recurrent layers, from 0. Its state tensors are pools.state[2·index]
            and pools.state[2·index + 1].
        constants: the layer's constants, which the kernels get.
        inputs: projected hidden states, [tokens, …] each.
        Returns the kernels' output, [tokens, inner].
        """
        pools = self.pools.state[2 * index : 2 * index + 2]
        mixed = list[Tensor]()
        if self.prefill:
            mixed.append(prefill(*(x[: self.prefilled] for x in inputs), constants, *pools, self.prefill))
        if rows := self.decode:
            mixed.append(decode(*(x[self.prefilled :] for x in inputs), constants, *pools, rows.slots, rows.positions))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def plan_batch(
    batch: Batch,
    pools: Pools,
    chunk_size: int,
    kernel: int,
    rotate: Callable[[Tensor], Rotation] | None = None,
    forms: Forms | None = None,
) -> BatchPlan:
    """Compute the plan of a step.

    chunk_size: how many tokens of a prompt the model's kernels compute together.
    kernel: the width of the model's convolutions.
    rotate: returns the rotation for positions; None if the model does not encode positions.
    forms: the limits of latent attention; None if the model has none, or always computes it in the absorbed form.
    """
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
        _divide(batch, pages, forms) if forms and pages else (),
    )


def _plan_prefill(prefill: Prefill, chunk_size: int, kernel: int, device: torch.device) -> PrefillPlan:
    segments = (prefill.offsets, prefill.starts, prefill.slots, prefill.saved())
    table = prefill.table or chunk_table(cut(*segments, chunk_size), device)
    return PrefillPlan(*segments, kernel, table)


def _divide(batch: Batch, pages: PagePlan, forms: Forms) -> Sequence[LongSegment | Span]:
    """Return the parts of latent attention; () where all of it is computed together, in the absorbed form."""
    prefill, rows = batch.prefill, len(batch.decode.slots) if batch.decode else 0
    if prefill is None or not takes(batch.tokens):
        return ()
    parts = divide(forms, prefill.offsets, prefill.starts, rows, pages)
    return () if len(parts) == 1 and isinstance(parts[0], Span) else parts


def _plan_pages(batch: Batch, page_size: int) -> PagePlan:
    """Plan attention for a batch with prompts. Each decoding row becomes a segment of one token."""
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
    """Plan attention for decoding rows only. Each decoding step runs this function, and _plan_pages would be slower."""
    offsets = torch.arange(len(rows.slots) + 1, device=rows.slots.device)
    page = rows.page_table.gather(1, (rows.positions // page_size)[:, None])[:, 0].long()
    places = page * page_size + rows.positions % page_size
    return PagePlan(offsets, rows.positions, rows.page_table, places, 0, 0)


def _stack(tables: list[Tensor]) -> Tensor:
    """Join page tables, after padding each to the width of the widest. The padding is never read."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
