"""From the rows of a step to the batch that the model sees: planned on the host, and packed to be uploaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.step.packing import Inbox, Packing, Section
from baton.actors.forward.step.rows import RowTable
from baton.kernels.prefill.chunk_table import ChunkLists, ChunkTable, cut
from baton.models.batch import Batch, Decode, PagePlan, Prefill, StateCheckpoint


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The chunks of a batch. lists: see kernels.prefill.chunk_table."""

    offsets: list[int]
    starts: list[int]
    slots: list[int]
    checkpoints: list[StateCheckpoint]
    tokens: Section
    lists: ChunkLists
    table: list[Section]


@dataclass(frozen=True, slots=True)
class PackedPages:
    """The fields of PagePlan; rows: of the page table, of each segment; width: how much of it is read."""

    rows: Section
    width: int
    offsets: Section
    starts: Section
    places: Section
    longest: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Chunks, and rows that decode: their indices and slots. positions: of all tokens."""

    positions: Section
    chunks: PackedChunks | None
    rows: Section | None
    slots: Section | None
    pages: PackedPages | None

    def unpack(self, inbox: Inbox, table: RowTable) -> Batch:
        """Views of the upload, and what is gathered by them."""
        positions = inbox.view(self.positions)
        chunks, prompts = self.chunks, len(self.chunks.starts) if self.chunks else 0
        rows = inbox.view(self.rows) if self.rows else None
        pages = self._pages(inbox, table, prompts)
        tokens = [inbox.view(chunks.tokens)] if chunks else []
        if rows is not None:
            tokens.append(table.last_token[rows])
        of_pages = pages.table if pages else torch.empty(prompts + len(positions), 0, dtype=torch.int32)
        prefill = _prefill(chunks, inbox, of_pages[:prompts]) if chunks else None
        decode = None
        if rows is not None and self.slots:
            at = positions[len(positions) - len(rows) :]
            decode = Decode(inbox.view(self.slots), at, of_pages[prompts:])
        return Batch(tokens[0] if len(tokens) == 1 else torch.cat(tokens), positions, prefill, decode, pages)

    def _pages(self, inbox: Inbox, table: RowTable, prompts: int) -> PagePlan | None:
        if not (pages := self.pages):
            return None
        of_rows = table.pages[inbox.view(pages.rows), : pages.width]
        offsets, starts = inbox.view(pages.offsets), inbox.view(pages.starts)
        return PagePlan(offsets, starts, of_rows, inbox.view(pages.places), prompts, pages.longest)


def pack_batch(
    packing: Packing, work: Work, table: RowTable, chunk_size: int, page_size: int, width: int | None = None
) -> PackedBatch:
    """width: entries of a row's page table to be read; None: as the longest row needs."""
    decodes = work.decodes
    rows = packing.put(decodes) if decodes else None
    slots = packing.put(table.slots[decodes]) if decodes else None
    if not work.chunks:
        at = np.array(work.positions)
        positions = packing.put(at)
        pages = None
        if rows and table.width:
            places = packing.put(_places(table, decodes, at, page_size))
            offsets = packing.put(np.arange(len(decodes) + 1))
            pages = PackedPages(rows, width or int(at.max()) // page_size + 1, offsets, positions, places, 0)
        return PackedBatch(positions, None, rows, slots, pages)
    at = np.concatenate([*(np.arange(chunk.start, chunk.stop) for chunk in work.chunks), work.positions])
    at = at.astype(np.int64, copy=False)
    chunks = _pack_chunks(packing, work, table, chunk_size)
    pages = _pack_pages(packing, work, at, table, page_size) if table.width else None
    return PackedBatch(packing.put(at), chunks, rows, slots, pages)


def _pack_pages(
    packing: Packing, work: Work, positions: NDArray[np.int64], table: RowTable, page_size: int
) -> PackedPages:
    """Of chunks, and of rows that decode behind them."""
    rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
    starts = [*(chunk.start for chunk in work.chunks), *work.positions]
    lengths = [*(chunk.stop - chunk.start for chunk in work.chunks), *(1 for _ in work.decodes)]
    return PackedPages(
        packing.put(rows),
        int(positions.max()) // page_size + 1,
        packing.put(np.concatenate([[0], np.cumsum(lengths)])),
        packing.put(starts),
        packing.put(_places(table, np.repeat(rows, lengths), positions, page_size)),
        max(lengths[: len(work.chunks)]),
    )


def _places(
    table: RowTable, rows: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64], page_size: int
) -> NDArray[np.int64]:
    """Of the token at each position of its row."""
    return table.host_pages[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size


def _pack_chunks(packing: Packing, work: Work, table: RowTable, chunk_size: int) -> PackedChunks:
    chunks = work.chunks
    offsets = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks]).tolist()]
    starts, slots = [chunk.start for chunk in chunks], table.slots[[chunk.row for chunk in chunks]].tolist()
    checkpoints = checkpoints_of(work, chunks)
    wanted = [(c.segment, c.position, c.slot) for c in checkpoints]
    lists = cut(offsets, starts, slots, wanted, chunk_size)
    tokens = np.concatenate([table[chunk.row].tokens[chunk.start : chunk.stop] for chunk in chunks])
    return PackedChunks(
        offsets, starts, slots, checkpoints, packing.put(tokens), lists, [packing.put(of) for of in lists]
    )


def checkpoints_of(work: Work, chunks: Sequence[WorkChunk]) -> list[StateCheckpoint]:
    segment = {chunk.row: index for index, chunk in enumerate(chunks)}
    return [StateCheckpoint(segment[c.row], c.position, c.slot) for c in work.checkpoints if c.row in segment]


def _prefill(chunks: PackedChunks, inbox: Inbox, page_table: Tensor) -> Prefill:
    table = ChunkTable(chunks.lists, *[inbox.view(section) for section in chunks.table])
    return Prefill(chunks.offsets, chunks.starts, chunks.slots, chunks.checkpoints, page_table, table)
