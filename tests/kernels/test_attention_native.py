from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kernels.attention import native, reference
from tests.kernels.installed import installed, runnable

F32, BF16 = torch.float32, torch.bfloat16
many = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Layout:
    """repeats: heads for each head of keys; segments: (start, length)."""

    kv_heads: int
    repeats: int
    width: int
    page_size: int
    segments: list[tuple[int, int]]


LAYOUTS = st.builds(
    Layout,
    kv_heads=st.integers(1, 3),
    repeats=st.integers(1, 5),
    width=st.one_of(st.integers(1, 40), st.sampled_from([64, 128])),
    page_size=st.sampled_from([1, 4, 16, 48]),
    segments=st.lists(
        st.tuples(st.one_of(st.just(0), st.integers(0, 200)), st.one_of(st.just(1), st.integers(1, 90))),
        min_size=1,
        max_size=4,
    ),
)


@dataclass(frozen=True)
class Given:
    """Entries that no segment has are NaN; keys and values of a page lie side by side, behind another layer's."""

    query: Tensor
    pages: Tensor
    table: Tensor
    offsets: list[int]
    starts: list[int]

    def run(self, form: object = native.paged_attention) -> Tensor:
        assert callable(form)
        keys, values = self.pages[:, 2], self.pages[:, 3]
        layout = torch.tensor(self.offsets), torch.tensor(self.starts)
        attended = form(self.query, keys, values, self.table, *layout, 0.3)
        assert isinstance(attended, Tensor)
        return attended

    def part(self, segment: int, begin: int, end: int) -> "Given":
        """Tokens [begin, end) of one segment."""
        first = self.offsets[segment]
        rows, start = slice(first + begin, first + end), self.starts[segment] + begin
        return Given(self.query[rows], self.pages, self.table[segment, None], [0, end - begin], [start])


def drawn(s: Layout, dtype: torch.dtype) -> Given:
    g = torch.Generator().manual_seed(0)
    needed = [-(-(start + length) // s.page_size) for start, length in s.segments]
    width = max(needed) + 1
    table = torch.randperm(len(needed) * width, generator=g).view(len(needed), width).int()
    pages = torch.full((table.numel(), 4, s.page_size, s.kv_heads, s.width), torch.nan, dtype=dtype)
    for segment, (start, length) in enumerate(s.segments):
        positions = torch.arange(start + length)
        page = table[segment, positions // s.page_size].long()
        stored = torch.randn(len(positions), 4, s.kv_heads, s.width, generator=g).to(dtype)
        pages[page, :, positions % s.page_size] = stored
    offsets = [0]
    for _, length in s.segments:
        offsets.append(offsets[-1] + length)
    query = torch.randn(offsets[-1], s.kv_heads * s.repeats, s.width, generator=g).to(dtype)
    return Given(query, pages, table, offsets, [start for start, _ in s.segments])


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, dtype=st.sampled_from([F32, BF16]))
def test_attention_equals_the_reference_and_reads_no_entry_beyond_a_segment(layout: Layout, dtype: torch.dtype) -> None:
    found = drawn(layout, dtype)
    exact = Given(found.query.float(), found.pages.float(), found.table, found.offsets, found.starts)
    tolerance = 2e-5 if dtype == F32 else 2**-7
    expected = exact.run(reference.paged_attention)
    torch.testing.assert_close(found.run().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, data=st.data())
def test_a_segment_gets_the_same_bits_alone_and_cut_anywhere(layout: Layout, data: st.DataObject) -> None:
    together = drawn(layout, F32)
    expected = together.run()
    for segment, (_, length) in enumerate(layout.segments):
        cut = data.draw(st.integers(0, length))
        cuts = [0, cut, length]
        parts = [together.part(segment, a, b).run() for a, b in pairwise(cuts) if a < b]
        assert torch.equal(torch.cat(parts), expected[together.offsets[segment] : together.offsets[segment + 1]])


def test_threads_change_no_bit() -> None:
    given = drawn(Layout(2, 3, 64, 16, [(0, 150), (190, 1), (70, 20)]), BF16)
    with installed(runnable()[0]):
        expected = given.run()
    for threads in (2, 3):
        with installed(runnable()[0], threads):
            assert torch.equal(given.run(), expected)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    g = drawn(Layout(2, 3, 8, 4, [(3, 5)]), F32)
    keys, values = g.pages[:, 2], g.pages[:, 3]
    for pages, table in [((keys.transpose(1, 2), values), g.table), ((keys, values), g.table.repeat(2, 1))]:
        with pytest.raises(ValueError, match=r"are not pages|do not fit"):
            native.paged_attention(g.query, *pages, table, torch.tensor(g.offsets), torch.tensor(g.starts), 0.3)
