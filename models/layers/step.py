"""The plan of a step: what every layer needs to know about the batch, computed once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.kernels.attention.latents.sizes import Forms
from baton.kernels.prefill.chunk_table import chunk_table, cut
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime.triton import takes
from baton.models.batch import Batch, Decode, PagePlan, Pools, Prefill
from baton.models.layers.rope import Rotation
from baton.models.layers.spans import LongSegment, Span, divide


class MixKernels(NamedTuple):
    """The kernels of a kind of recurrent layers."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]  # for one token of each row
    decode_drafts: Callable[..., Tensor]  # for the tokens of rows with drafts
    tensors: int = 2  # how many state tensors a layer has: the convolution's last inputs, and a recurrent state


@runtime_checkable
class Mixer(Protocol):
    """A recurrent layer."""

    def replay(self, step: "BatchPlan") -> None:
        """Advance the states of decoding rows that feed nothing: replay their accepted drafts."""
        ...


@dataclass(frozen=True)
class BatchPlan:
    """A batch, divided into prompt tokens, in one segment per row, and the tokens of decoding rows, one per row."""

    pools: Pools
    prefilled: int  # the number of prompt tokens, which come first
    prefill: PrefillPlan | None
    decode: Decode | None
    pages: PagePlan | None
    rotations: Sequence[Rotation] = ()  # layers may have different ones; empty: positions are not encoded
    parts: Sequence[LongSegment | Span] = ()  # the parts that latent attention computes separately; empty: one part

    @property
    def padding(self) -> Tensor | None:
        """The mask of padding tokens, bool [tokens], in a step that only decodes; None if no token is padding."""
        return self.decode.padding if self.decode and not self.prefill else None

    def mix(self, index: int, kernels: MixKernels, constants: object, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer's kernels over the batch.

        index: the layer's number among the model's recurrent layers, from 0. All of them have the same kernels, and the
            state tensors of layer i are the i-th `kernels.tensors` of pools.state.
        constants: the layer's constants, which the kernels get.
        inputs: projected hidden states, [tokens, …] each.
        Returns the kernels' output, [tokens, inner].
        """
        pools = self.pools.state[kernels.tensors * index : kernels.tensors * (index + 1)]
        mixed = list[Tensor]()
        if self.prefill:
            mixed.append(kernels.prefill(*(x[: self.prefilled] for x in inputs), constants, *pools, self.prefill))
        if rows := self.decode:
            arguments = (*(x[self.prefilled :] for x in inputs), constants, *pools, rows.slots, rows.positions)
            if rows.drafts is None:
                mixed.append(kernels.decode(*arguments))
            else:
                mixed.append(kernels.decode_drafts(*arguments, rows.drafts, self.pools.rings[index]))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def plan_batch(
    batch: Batch,
    pools: Pools,
    chunk_size: int,
    kernel: int,
    rotate: Sequence[Callable[[Tensor], Rotation]] = (),
    forms: Forms | None = None,
) -> BatchPlan:
    """Compute the plan of a step.

    chunk_size: how many tokens of a prompt the model's kernels compute together.
    kernel: the width of the model's convolutions.
    rotate: functions that return the rotations for positions; empty if the model does not encode positions.
    forms: the limits of latent attention; None if the model has none, or always computes it in the absorbed form.
    """
    prefill, pages = batch.prefill, batch.pages
    if pools.pages and pages is None:
        only_rows = batch.decode if prefill is None else None
        pages = (
            _plan_rows(only_rows, batch.positions, pools.page_size)
            if only_rows
            else _plan_pages(batch, pools.page_size)
        )
    return BatchPlan(
        pools,
        prefill.offsets[-1] if prefill else 0,
        _plan_prefill(prefill, chunk_size, kernel, batch.tokens.device) if prefill else None,
        batch.decode,
        pages,
        [rotation(batch.positions) for rotation in rotate],
        _divide(batch, pages, forms) if forms and pages else (),
    )


def _plan_prefill(prefill: Prefill, chunk_size: int, kernel: int, device: torch.device) -> PrefillPlan:
    segments = (prefill.offsets, prefill.starts, prefill.slots, prefill.saved())
    table = prefill.table or chunk_table(cut(*segments, chunk_size), device)
    return PrefillPlan(*segments, kernel, table)


def _divide(batch: Batch, pages: PagePlan, forms: Forms) -> Sequence[LongSegment | Span]:
    """Return the parts of latent attention; () where all of it is computed together, in the absorbed form."""
    prefill, rows = batch.prefill, len(batch.tokens) - batch.prefill.offsets[-1] if batch.prefill else 0
    if prefill is None or not takes(batch.tokens):
        return ()
    parts = divide(forms, prefill.offsets, prefill.starts, rows, pages)
    return () if len(parts) == 1 and isinstance(parts[0], Span) else parts


def _plan_pages(batch: Batch, page_size: int) -> PagePlan:
    """Plan attention for a batch with prompts. Each token of a decoding row becomes a segment."""
    offsets, starts, tables = [torch.zeros(1, dtype=torch.int64)], list[Tensor](), list[Tensor]()
    prompts, longest, device = 0, 0, batch.tokens.device
    if batch.prefill:
        offsets, starts = [torch.tensor(batch.prefill.offsets)], [torch.tensor(batch.prefill.starts)]
        tables.append(batch.prefill.page_table)
        prompts, longest = len(tables[0]), int(offsets[0].diff().max())
    if batch.decode:
        first = int(offsets[0][-1])
        of_rows = _plan_rows(batch.decode, batch.positions[first:], page_size)
        offsets.append(torch.arange(first + 1, len(batch.positions) + 1))
        starts.append(of_rows.starts)
        tables.append(of_rows.table)
    bounds, table = torch.cat(offsets), _stack(tables)
    segment = torch.repeat_interleave(torch.arange(len(table)), bounds.diff()).to(table.device)
    page = table[segment, batch.positions // page_size].long()
    places = page * page_size + batch.positions % page_size
    of_segments = torch.cat([start.to(device) for start in starts])
    return PagePlan(bounds.to(device), of_segments, table, places, prompts, longest)


def _plan_rows(rows: Decode, positions: Tensor, page_size: int) -> PagePlan:
    """Plan attention for decoding rows only. Each decoding step runs this function, and _plan_pages would be slower.

    Each draft is a segment too, so that its result has the bits of a step without drafts.
    positions: int64 [tokens], of all tokens that the rows feed.
    """
    table, offsets = rows.page_table, torch.arange(len(positions) + 1, device=positions.device)
    if rows.drafts is not None:
        table = table.repeat_interleave(rows.drafts.offsets.diff(), 0)
    page = table.gather(1, (positions // page_size)[:, None])[:, 0].long()
    return PagePlan(offsets, positions, table, page * page_size + positions % page_size, 0, 0)


def _stack(tables: list[Tensor]) -> Tensor:
    """Join page tables, after padding each to the width of the widest. The padding is never read."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
