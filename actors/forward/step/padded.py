"""Decoding rows with drafts in a captured step: every array has the length that the step was captured with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.actors.forward.device import Work
from baton.actors.forward.step.batching import NO_PAGES, PackedBatch, places_of
from baton.actors.forward.step.drafting import LAST_TOKEN, PackedDrafts, fed_drafts
from baton.actors.forward.step.drawing import Draws, PackedDraws, pack_draws
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.kernels.drafts import Drafts
from baton.models.batch import PagePlan


def pack_padded(
    inbox: Inbox, work: Work, table: RowTable, page_size: int, size: int, most: int
) -> tuple[PackedBatch, PackedDraws]:
    """Pack rows that decode with drafts, and their draws, as a step of `size` rows that feed `size` tokens.

    Rows of padding feed nothing. Tokens of padding belong to no row, and use the page of the padding row.

    most: how many drafts a row may feed or replay, in any step of this size.
    """
    drafts, replays = fed_drafts(work), {draft.row: draft.replays for draft in work.drafts}
    fed = [1 + len(tokens) for tokens in drafts]
    replayed = [replays.get(row, 0) for row in work.decodes]
    offsets = _padded(np.cumsum([0, *fed]), size + 1, sum(fed))
    begins = offsets + _padded(np.cumsum([0, *replayed]), size + 1, sum(replayed))
    rows = _padded(work.decodes, size, table.padding)
    positions = inbox.put(_padded(work.positions, size, 0))
    row_of = _padded(np.repeat(work.decodes, fed), size, table.padding)
    first = np.repeat(work.positions, fed) - np.repeat(offsets[: len(fed)], fed)
    at = _padded(first + np.arange(sum(fed)), size, 0)
    tokens = _padded([token for row in drafts for token in (LAST_TOKEN, *row)], size, LAST_TOKEN)
    rows_on_device, of_tokens, at_on_device = inbox.put(rows), inbox.put(row_of), inbox.put(at)
    packed = PackedDrafts(
        Drafts(inbox.put(begins), inbox.put(offsets), rows_on_device, size * (1 + most), most),
        positions,
        of_tokens,
        inbox.put(tokens),
    )
    pages = None
    if table.width:
        places = inbox.put(places_of(table, row_of, at, page_size))
        pages = PagePlan(inbox.put(np.arange(size + 1)), at_on_device, NO_PAGES, places, 0, 0)
    slots = inbox.put(table.slots[rows])
    batch = PackedBatch(at_on_device, None, None, rows_on_device, slots, pages, of_tokens, table.width, packed)
    draws = Draws(row_of.tolist(), [], (at + 1).tolist(), [])
    return batch, pack_draws(inbox, draws, table, whole=True)


def _padded(values: Sequence[int] | NDArray[np.int64], size: int, padding: int) -> NDArray[np.int64]:
    """Return the values, followed by `padding` up to `size` of them."""
    result = np.full(size, padding, np.int64)
    result[: len(values)] = values
    return result
