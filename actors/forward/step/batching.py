"""From the rows of a step to the batch that the model sees: planned and packed on the host, completed on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
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
    page_rows: Tensor | None = None  # int64 [segments]: the row of each segment, which is a chunk or a decoding row
    width: int = 0  # entries of a row's page table that the step needs

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
        if self.rows is not None and self.slots is not None:
            tokens.append(table.last_token[self.rows])
            decode = Decode(self.slots, self.positions[-len(self.rows) :], page_table[prompts:])
        return Batch(tokens[0] if len(tokens) == 1 else torch.cat(tokens), self.positions, prefill, decode, pages)


def pack_batch(
    inbox: Inbox, work: Work, table: RowTable, chunk_size: int, page_size: int, width: int | None = None
) -> PackedBatch:
    """Pack the chunks and the decoding rows of a step.

    chunk_size: the model's chunk size, for the chunk table of its prefill kernels.
    width: entries of a row's page table to read; None: as many as the longest row needs.
    """
    decodes = work.decodes
    rows = inbox.put(decodes) if decodes else None
    slots = inbox.put(table.slots[decodes]) if decodes else None
    if not work.chunks:
        at = np.array(work.positions)
        positions = inbox.put(at)
        if rows is None or not table.width:
            return PackedBatch(positions, None, None, rows, slots, None)
        # Each decoding row is a segment of one token, so the segments' starts are the rows' positions.
        places = inbox.put(_places(table, decodes, at, page_size))
        pages = PagePlan(inbox.put(np.arange(len(decodes) + 1)), positions, NO_PAGES, places, 0, 0)
        return PackedBatch(positions, None, None, rows, slots, pages, rows, width or int(at.max()) // page_size + 1)
    at = np.concatenate([*(np.arange(chunk.start, chunk.stop) for chunk in work.chunks), work.positions])
    at = at.astype(np.int64, copy=False)
    tokens = np.concatenate([table[chunk.row].tokens[chunk.start : chunk.stop] for chunk in work.chunks])
    prefill = _pack_prefill(inbox, work, table, chunk_size)
    positions, prompt_tokens = inbox.put(at), inbox.put(tokens)
    if not table.width:
        return PackedBatch(positions, prompt_tokens, prefill, rows, slots, None)
    segment_rows = [*(chunk.row for chunk in work.chunks), *decodes]
    pages = _pack_pages(inbox, work, at, table, page_size)
    width = int(at.max()) // page_size + 1
    return PackedBatch(positions, prompt_tokens, prefill, rows, slots, pages, inbox.put(segment_rows), width)


def _pack_pages(inbox: Inbox, work: Work, positions: NDArray[np.int64], table: RowTable, page_size: int) -> PagePlan:
    """Pack the page plan of chunks, followed by the rows that decode. The page table is gathered on the device."""
    rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
    lengths = [*(chunk.stop - chunk.start for chunk in work.chunks), *(1 for _ in work.decodes)]
    return PagePlan(
        offsets=inbox.put(np.concatenate([[0], np.cumsum(lengths)])),
        starts=inbox.put([*(chunk.start for chunk in work.chunks), *work.positions]),
        table=NO_PAGES,
        places=inbox.put(_places(table, np.repeat(rows, lengths), positions, page_size)),
        prompts=len(work.chunks),
        longest=max(lengths[: len(work.chunks)]),
    )


def _places(
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
