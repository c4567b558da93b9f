"""The parts into which latent attention divides a batch on a GPU: long segments, and spans of short ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.kernels.attention.latents.sizes import Forms, is_long
from baton.models.batch import PagePlan


@dataclass(frozen=True)
class LongSegment:
    """A segment whose keys and values are computed by heads."""

    index: int  # its row of the page table
    first: int  # its first token within the batch
    length: int  # tokens
    start: int  # absolute position of its first token


@dataclass(frozen=True)
class Span:
    """Segments that follow each other, whose attention is computed in the absorbed form."""

    first: int  # their first token within the batch
    stop: int  # the token after their last one
    pages: PagePlan  # their part of the plan; offsets count from `first`. Without places: latents are written already.


def divide(
    forms: Forms, offsets: Sequence[int], starts: Sequence[int], rows: int, pages: PagePlan
) -> list[LongSegment | Span]:
    """Divide a batch with prompts into parts, in the order of its tokens.

    A segment's form depends only on the number of its tokens, and not on the rest of the batch. Nothing is read from
    the device.

    offsets, starts: of the prompts' segments, as in Prefill. rows: how many rows decode, after the prompts.
    pages: the plan of the whole batch.
    """
    bounds = [*offsets, *range(offsets[-1] + 1, offsets[-1] + rows + 1)]
    parts, begin = list[LongSegment | Span](), 0
    for index, (first, stop) in enumerate(pairwise(bounds)):
        if index < len(starts) and is_long(forms.shortest, stop - first):
            parts += _span(bounds, begin, index, len(starts), pages)
            parts.append(LongSegment(index, first, stop - first, starts[index]))
            begin = index + 1
        elif index > begin and stop - bounds[begin] > forms.absorbed:
            parts += _span(bounds, begin, index, len(starts), pages)
            begin = index
    return parts + _span(bounds, begin, len(bounds) - 1, len(starts), pages)


def _span(bounds: Sequence[int], begin: int, end: int, prompts: int, pages: PagePlan) -> list[Span]:
    """Return a list with the span of the segments [begin, end); [] if begin == end.

    prompts: the number of the batch's prompt segments, which come before the others.
    """
    if begin == end:
        return []
    first, count = bounds[begin], max(min(end, prompts) - begin, 0)
    longest = max((stop - start for start, stop in pairwise(bounds[begin : begin + count + 1])), default=0)
    # Copies, because kernels expect tensors that begin at multiples of 16 bytes.
    offsets, starts = pages.offsets[begin : end + 1] - first, pages.starts[begin:end].clone()
    plan = PagePlan(offsets, starts, pages.table[begin:end].clone(), pages.places[:0], count, longest)
    return [Span(first, bounds[end], plan)]
