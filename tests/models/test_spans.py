"""The division of a batch into long segments and spans of short ones."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from baton.kernels.attention.latents.sizes import Forms
from baton.models.batch import PagePlan
from baton.models.layers.spans import LongSegment, Span, divide

WIDTH = 3


def plan_of(lengths: list[int], starts: list[int], prompts: int) -> PagePlan:
    """Return the page plan of segments, whose page tables have numbers that differ from each other."""
    table = torch.arange(len(lengths) * WIDTH, dtype=torch.int32).view(len(lengths), WIDTH)
    offsets, places = torch.tensor([0, *accumulate(lengths)]), torch.arange(sum(lengths))
    return PagePlan(offsets, torch.tensor(starts), table, places, prompts, max(lengths[:prompts], default=0))


@given(
    prompts=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 12)), min_size=1, max_size=6),
    rows=st.integers(0, 5),
    forms=st.builds(Forms, st.integers(1, 14), st.integers(1, 9)),
)
def test_every_segment_is_in_one_part_and_its_form_depends_on_nothing_else(
    prompts: list[tuple[int, int]], rows: int, forms: Forms
) -> None:
    lengths, starts = [n for _, n in prompts] + [1] * rows, [start for start, _ in prompts] + [50] * rows
    offsets, whole = [0, *accumulate(lengths[: len(prompts)])], plan_of(lengths, starts, len(prompts))
    parts, segment = divide(forms, offsets, starts[: len(prompts)], rows, whole), 0
    for part in parts:
        first = sum(lengths[:segment])
        if isinstance(part, LongSegment):
            assert part == LongSegment(segment, first, lengths[segment], starts[segment])
            assert segment < len(prompts) and lengths[segment] >= forms.shortest
            segment += 1
            continue
        count = len(part.pages.table)
        own, later = lengths[segment : segment + count], segment + count
        assert count == 1 or sum(own) <= forms.absorbed
        assert all(n < forms.shortest for n in lengths[segment : min(later, len(prompts))])
        assert (part.first, part.stop) == (first, first + sum(own))
        assert part.pages.offsets.diff().tolist() == own and part.pages.offsets[0] == 0
        assert part.pages.starts.tolist() == starts[segment:later]
        assert torch.equal(part.pages.table, whole.table[segment:later])
        assert part.pages.prompts == max(0, min(len(prompts), later) - segment)
        assert part.pages.longest == max(own[: part.pages.prompts], default=0)
        segment = later
    assert segment == len(lengths)
    joined = [one for one, other in pairwise(parts) if isinstance(one, Span) and isinstance(other, Span)]
    assert not joined or sum(lengths) > forms.absorbed


@pytest.mark.parametrize(("absorbed", "expected"), [(100, [(0, 9)]), (4, [(0, 3), (3, 7), (7, 9)])])
def test_short_segments_are_divided_where_they_would_take_too_much_memory(
    absorbed: int, expected: list[tuple[int, int]]
) -> None:
    plan = plan_of([3, 4, 1, 1], [0, 5, 9, 9], 2)
    parts = divide(Forms(5, absorbed), [0, 3, 7], [0, 5], 2, plan)
    assert [(part.first, part.stop) for part in parts if isinstance(part, Span)] == expected
