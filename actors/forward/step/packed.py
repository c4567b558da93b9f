"""All that a step uploads, packed before anything of it is enqueued."""

from dataclasses import dataclass

from baton.actors.forward.device import Work
from baton.actors.forward.step.batching import PackedBatch, pack_batch
from baton.actors.forward.step.drawing import (
    PackedAdjustments,
    PackedDraws,
    draws_of,
    offsets_of,
    pack_adjustments,
    pack_draws,
    pack_masks,
)
from baton.actors.forward.step.packing import Packing, Section
from baton.actors.forward.step.reporting import (
    PackedAsked,
    PackedPrompt,
    PackedReports,
    first_tokens,
    pack_prompts,
    pack_reports,
)
from baton.actors.forward.step.rows import PageUpdate, RowTable
from baton.actors.requests import RowLogprobs

NO_REPORTS = PackedReports(None, PackedAsked(None, []), [])


@dataclass(frozen=True, slots=True)
class PackedStep:
    """batch: what is computed by one call of the model; at: which of its hidden states are drawn behind, None: all.

    unsampled: the chunks that nothing is drawn behind; ends: their last hidden states, None if there are no such.
    draws: None where the rows are drawn for elsewhere, or none is. first: log probabilities that need no model.
    """

    work: Work
    batch: PackedBatch | None
    at: Section | None
    unsampled: list[int]
    ends: Section | None
    draws: PackedDraws | None
    adjustments: PackedAdjustments
    reports: PackedReports
    prompts: list[PackedPrompt]
    first: list[RowLogprobs]
    moved: PageUpdate | None


def pack_step(
    packing: Packing, work: Work, table: RowTable, chunk_size: int, page_size: int, decodes_apart: bool
) -> PackedStep:
    """decodes_apart: the rows that decode are computed elsewhere, and where there are no others also drawn for."""
    draws = draws_of(work)
    here = Work(work.step, work.chunks, [], [], work.checkpoints) if decodes_apart else work
    of_batch = draws.at[: len(draws.at) - len(work.decodes)] if decodes_apart else draws.at
    are_plain = bool(table.is_plain[draws.rows].all())
    masks = pack_masks(packing, draws, work.masks)
    ends = [offset + c.stop - c.start - 1 for c, offset in offsets_of(work) if not c.samples]
    return PackedStep(
        work,
        pack_batch(packing, here, table, chunk_size, page_size) if here.chunks or here.decodes else None,
        packing.put(of_batch) if work.chunks else None,
        [number for number, chunk in enumerate(work.chunks) if not chunk.samples],
        packing.put(ends) if ends else None,
        pack_draws(packing, draws, table) if draws.rows and (work.chunks or not decodes_apart) else None,
        PackedAdjustments(masks=masks) if are_plain else pack_adjustments(packing, draws, table, masks),
        NO_REPORTS if are_plain else pack_reports(packing, draws, table),
        pack_prompts(packing, work, table),
        first_tokens(work, table),
        table.pack(packing),
    )
