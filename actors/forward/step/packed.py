"""All arrays that a step uploads, packed before any work of the step is enqueued."""

from dataclasses import dataclass

from torch import Tensor

from baton.actors.forward.device import Work
from baton.actors.forward.step.batching import PackedBatch, pack_batch
from baton.actors.forward.step.drafting import PackedVerification, pack_commits, pack_verification
from baton.actors.forward.step.drawing import (
    Adjustments,
    PackedDraws,
    draws_of,
    offsets_of,
    pack_adjustments,
    pack_draws,
    pack_masks,
)
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.pooling import PooledChunk, pooled_chunks
from baton.actors.forward.step.predicting import PackedPredictions, pack_predictions
from baton.actors.forward.step.reporting import (
    DrawReports,
    PromptReport,
    TokenReports,
    first_tokens,
    pack_prompts,
    pack_reports,
)
from baton.actors.forward.step.rows import PageUpdate, RowTable
from baton.actors.requests import RowLogprobs
from baton.models.batch import Decode

NO_REPORTS = DrawReports(None, TokenReports(None, []), [])


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step whose arrays are in the inbox."""

    work: Work
    batch: PackedBatch | None  # the batch of one call of the model; None if all rows of the step are captured
    at: Tensor | None  # int64: indices of the hidden states to draw from; None: all of them
    unsampled: list[int]  # indices of the chunks after which no token is drawn
    ends: Tensor | None  # int64: indices of the last hidden states of `unsampled` chunks; None if there are none
    draws: PackedDraws | None  # None if nothing is drawn, or if a captured graph draws
    adjustments: Adjustments
    reports: DrawReports
    prompts: list[PromptReport]
    pooled: list[PooledChunk]
    first: list[RowLogprobs]  # reports of first tokens of prompts, which have no log probability
    page_update: PageUpdate | None  # None if the device's page table is up to date
    verification: PackedVerification | None  # None without drafts
    commits: Decode | None  # rows that put accepted drafts into their states and feed nothing
    predictions: PackedPredictions | None  # None: no tokens are predicted after the step


def pack_step(
    inbox: Inbox, work: Work, table: RowTable, chunk_size: int, page_size: int, captures_decodes: bool
) -> PackedStep:
    """Pack a step.

    captures_decodes: the rows that decode are replayed from a captured graph, which also draws for them if the step has
    no chunks. The packed batch then has only the chunks.
    """
    draws = draws_of(work)
    here = Work(work.step, work.chunks, [], [], work.checkpoints) if captures_decodes else work
    of_batch = draws.at[: sum(chunk.samples for chunk in work.chunks)] if captures_decodes else draws.at
    are_plain = bool(table.is_plain[draws.rows].all())
    masks = pack_masks(inbox, draws, work.masks) if work.masks else None
    ends = [offset + c.stop - c.start - 1 for c, offset in offsets_of(work) if not c.samples]
    return PackedStep(
        work,
        pack_batch(inbox, here, table, chunk_size, page_size) if here.chunks or here.decodes else None,
        inbox.put(of_batch) if work.chunks else None,
        [number for number, chunk in enumerate(work.chunks) if not chunk.samples],
        inbox.put(ends) if ends else None,
        pack_draws(inbox, draws, table) if draws.rows and (work.chunks or not captures_decodes) else None,
        Adjustments(masks=masks) if are_plain else pack_adjustments(inbox, draws, table, masks),
        NO_REPORTS if are_plain else pack_reports(inbox, draws, table),
        pack_prompts(inbox, work, table),
        pooled_chunks(work, table),
        first_tokens(work, table),
        table.pack(inbox),
        pack_verification(inbox, work),
        pack_commits(inbox, work.commits, table) if work.commits else None,
        pack_predictions(inbox, work, draws, table, page_size),
    )
