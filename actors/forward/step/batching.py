"""From the rows of a step to the batch that the model sees: planned and packed on the host, completed on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.step.drafting import PackedDrafts, fed_drafts, pack_drafts
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.kernels.prefill.chunk_table import ChunkTable, cut
from baton.models.batch import Batch, Decode, PagePlan, Prefill, StateCheckpoint

NO_PAGES = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch in the inbox. It lacks what only the device has: last sampled tokens, and rows of the page table."""

    positions: Tensor  # int64 [T]: the absolute position of each of the batch's T tokens
    prompt_tokens: Tensor | None  # int64: the tokens of the chunks
    prefill: Prefill | None  # without page_table
    rows: Tensor | None  # int64 [rows that decode]: the indices of these rows
    slots: Tensor | None  # int64 [rows that decode]: the state slots of these rows
    pages: PagePlan | None  # without table
    page_rows: Tensor | None = None  # int64 [segments]: the row of each segment: a chunk, or a token of a decoding row
    width: int = 0  # entries of a row's page table that the step needs
    drafts: PackedDrafts | None = None  # None: each decoding row feeds its last token

    def complete(self, table: RowTable) -> Batch:
        """Enqueue the missing gathers, and return the batch. Call after the upload and the update of the page table."""
        prefill, decode, pages = self.prefill, None, self.pages
        prompts = len(prefill.starts) if prefill else 0
        page_table = torch.empty(prompts + len(self.positions), 0, dtype=torch.int32)
        if pages and self.page_rows is not None:
            page_table = table.pages[self.page_rows, : self.width]
            pages = replace(pages, table=page_table)
        tokens = [] if self.prompt_tokens is None else [self.prompt_tokens]
        if prefill:
            prefill = replace(prefill, page_table=page_table[:prompts])
        if self.rows is not None and self.slots is not None and self.drafts is None:
            tokens.append(table.last_token[self.rows])
            decode = Decode(self.slots, self.positions[-len(self.rows) :], page_table[prompts:])
        elif self.rows is not None and self.slots is not None and self.drafts is not None:
            tokens.append(self.drafts.fed(table))
            page_table = table.pages[self.rows, : self.width]
            decode = Decode(self.slots, self.drafts.positions, page_table, drafts=self.drafts.drafts)
        return Batch(tokens[0] if len(tokens) == 1 else torch.cat(tokens), self.positions, prefill, decode, pages)


def pack_batch(
    inbox: Inbox, work: Work, table: RowTable, chunk_size: int, page_size: int, width: int | None = None
) -> PackedBatch:
    """Pack the chunks and the decoding rows of a step.

    chunk_size: the model's chunk size, for the chunk table of its prefill kernels.
    width: entries of a row's page table to read; None: as many as the longest row needs.
    """
    decodes, drafts = work.decodes, pack_drafts(inbox, work)
    rows = inbox.put(decodes) if decodes else None
    slots = inbox.put(table.slots[decodes]) if decodes else None
    if not work.chunks and drafts is None:
        at = np.array(work.positions)
        positions = inbox.put(at)
        if rows is None or not table.width:
            return PackedBatch(positions, None, None, rows, slots, None)
        # Each decoding row is a segment of one token, so the segments' starts are the rows' positions.
        places = inbox.put(places_of(table, decodes, at, page_size))
        pages = PagePlan(inbox.put(np.arange(len(decodes) + 1)), positions, NO_PAGES, places, 0, 0)
        return PackedBatch(positions, None, None, rows, slots, pages, rows, width or int(at.max()) // page_size + 1)
    fed = zip(work.positions, fed_drafts(work), strict=True)
    of_rows = [position + number for position, tokens in fed for number in range(1 + len(tokens))]
    at = np.concatenate([*(np.arange(chunk.start, chunk.stop) for chunk in work.chunks), of_rows])
    at = at.astype(np.int64, copy=False)
    prefill, prompt_tokens = None, None
    if work.chunks:
        prefill = _pack_prefill(inbox, work, table, chunk_size)
        tokens = [table[chunk.row].tokens[chunk.start : chunk.stop] for chunk in work.chunks]
        prompt_tokens = inbox.put(np.concatenate(tokens))
    positions = inbox.put(at)
    if not table.width:
        return PackedBatch(positions, prompt_tokens, prefill, rows, slots, None, drafts=drafts)
    pages, segment_rows = _pack_pages(inbox, work, at, table, page_size)
    width = int(at.max()) // page_size + 1
    return PackedBatch(positions, prompt_tokens, prefill, rows, slots, pages, segment_rows, width, drafts)


def _pack_pages(
    inbox: Inbox, work: Work, positions: NDArray[np.int64], table: RowTable, page_size: int
) -> tuple[PagePlan, Tensor]:
    """Pack the page plan of chunks, then of each token of the rows that decode. Return it with the segments' rows.

    The page table is gathered on the device.
    """
    fed = [1 + len(tokens) for tokens in fed_drafts(work)]
    chunks = [chunk.stop - chunk.start for chunk in work.chunks]
    rows = [*(chunk.row for chunk in work.chunks), *np.repeat(work.decodes, fed).astype(np.int64).tolist()]
    lengths = chunks + [1] * sum(fed)
    plan = PagePlan(
        offsets=inbox.put(np.concatenate([[0], np.cumsum(lengths)])),
        starts=inbox.put([*(chunk.start for chunk in work.chunks), *positions[sum(chunks) :].tolist()]),
        table=NO_PAGES,
        places=inbox.put(places_of(table, np.repeat(rows, lengths), positions, page_size)),
        prompts=len(work.chunks),
        longest=max(chunks, default=0),
    )
    return plan, inbox.put(rows)


def places_of(
    table: RowTable, rows: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64], page_size: int
) -> NDArray[np.int64]:
    """Return the flat KV index (page · page_size + offset) of each token, given its row and its position."""
    return table.host_pages[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size


def _pack_prefill(inbox: Inbox, work: Work, table: RowTable, chunk_size: int) -> Prefill:
    """Pack the chunks of a step. Their page table is gathered later, on the device."""
    chunks = work.chunks
    offsets = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks]).tolist()]
    starts, slots = [chunk.start for chunk in chunks], table.slots[[chunk.row for chunk in chunks]].tolist()
    checkpoints = checkpoints_of(work, chunks)
    lists = cut(offsets, starts, slots, [(c.segment, c.position, c.slot) for c in checkpoints], chunk_size)
    chunk_table = ChunkTable(lists, *[inbox.put(values) for values in lists])
    return Prefill(offsets, starts, slots, checkpoints, NO_PAGES, chunk_table)


def checkpoints_of(work: Work, chunks: Sequence[WorkChunk]) -> list[StateCheckpoint]:
    """Return the step's checkpoints inside its chunks. Decoding rows' checkpoints are copied after the step."""
    segment = {chunk.row: index for index, chunk in enumerate(chunks)}
    return [StateCheckpoint(segment[c.row], c.position, c.slot) for c in work.checkpoints if c.row in segment]
