from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from baton.kernels.attention.paged import native, reference
from baton.kernels.runtime import cpp
from tests.kernels.rounding import assert_within, attention_error, unit

F32, BF16 = torch.float32, torch.bfloat16
SCALE = 0.3
many = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Layout:
    """The shapes of a batch and its pages."""

    kv_heads: int
    repeats: int  # query heads for each key head
    width: int
    page_size: int
    segments: list[tuple[int, int]]  # (start, length)
    lacking: int = 0  # columns by which values are narrower than keys
    window: int = 0
    apart: bool = False  # if true, value pages are as wide as key pages, and values are their first columns


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
    lacking=st.one_of(st.just(0), st.integers(1, 70)),
    window=st.one_of(st.just(0), st.integers(1, 300)),
    apart=st.booleans(),
)
LATENTS = Layout(1, 32, 576, 16, [(0, 20), (70, 1), (130, 3)], 64, apart=True)


@dataclass(frozen=True)
class Given:
    """A batch. Page entries that belong to no segment are NaN. In each page, another layer's entries come first."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    offsets: list[int]
    starts: list[int]
    seen_from: int = 0
    window: int = 0

    def run(self, form: object = native.paged_attention) -> Tensor:
        assert callable(form)
        layout = torch.tensor(self.offsets), torch.tensor(self.starts)
        attended = form(self.query, self.keys, self.values, self.table, *layout, SCALE, self.seen_from, self.window)
        assert isinstance(attended, Tensor)
        return attended

    def tolerance(self) -> float:
        """Return how far two float32 results may differ."""
        tokens = max(
            start + end - begin for start, (begin, end) in zip(self.starts, pairwise(self.offsets), strict=True)
        )
        return 2 * attention_error(self.query, self.keys, self.values, SCALE, tokens)

    def part(self, segment: int, begin: int, end: int) -> "Given":
        """Return tokens [begin, end) of one segment as a batch of their own."""
        first = self.offsets[segment]
        rows, start = slice(first + begin, first + end), self.starts[segment] + begin
        return replace(
            self, query=self.query[rows], table=self.table[segment, None], offsets=[0, end - begin], starts=[start]
        )


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
    keys, values = pages[:, 2], pages[:, 3, ..., : max(1, s.width - s.lacking)]
    values, starts = values if s.apart else own_pages(values), [start for start, _ in s.segments]
    return Given(query, keys, values, table, offsets, starts, window=s.window)


def own_pages(values: Tensor) -> Tensor:
    """Copy values to pages of their own, in which each page's values come after another layer's, which are NaN."""
    return torch.stack([torch.full_like(values, torch.nan), values], 1)[:, 1]


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, dtype=st.sampled_from([F32, BF16]))
@example(layout=LATENTS, dtype=F32)
@example(layout=LATENTS, dtype=BF16)
def test_attention_equals_the_reference_and_reads_no_entry_beyond_a_segment(layout: Layout, dtype: torch.dtype) -> None:
    assert_equals_the_reference(drawn(layout, dtype), dtype)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("seen_from", [1, 63, 70])
def test_earlier_positions_are_not_seen(seen_from: int, dtype: torch.dtype) -> None:
    batch = drawn(Layout(2, 3, 24, 16, [(70, 90), (150, 1), (71, 3)]), dtype)
    assert_equals_the_reference(replace(batch, seen_from=seen_from), dtype)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("seen_from", [0, 70])
def test_positions_before_a_tokens_window_are_not_seen(window: int, seen_from: int, dtype: torch.dtype) -> None:
    batch = drawn(Layout(2, 3, 24, 16, [(70, 90), (150, 1), (127, 1), (128, 1), (79, 3)], window=window), dtype)
    assert_equals_the_reference(replace(batch, seen_from=seen_from), dtype)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_weight_of_an_unseen_position_is_zero(dtype: torch.dtype) -> None:
    """The position is in a block with seen ones, and the least result of exp times its value would be about 1."""
    batch = drawn(Layout(1, 1, 16, 16, [(140, 1)], window=3), dtype)
    expected = batch.run()
    batch.values[batch.table[0, 128 // 16], 128 % 16] = 2.0**126
    assert torch.equal(batch.run(), expected)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("start", [255, 256, 300])
def test_pages_before_the_block_in_which_a_window_begins_are_not_read(start: int, dtype: torch.dtype) -> None:
    """Blocks have 64 positions, and begin at multiples of 64."""
    batch = drawn(Layout(2, 3, 24, 16, [(start, 4)], window=65), dtype)
    expected, first_read = batch.run(), (start - 64) // 64 * 64
    batch.table[0, : first_read // 16] = 2**30
    assert torch.equal(batch.run(), expected)


def assert_equals_the_reference(found: Given, dtype: torch.dtype) -> None:
    exact = replace(found, query=found.query.float(), keys=found.keys.float(), values=found.values.float())
    expected, bound = exact.run(reference.paged_attention), torch.tensor(exact.tolerance())
    if dtype == BF16:
        size = replace(exact, values=exact.values.abs()).run(reference.paged_attention)
        bound = bound + unit(BF16) * (size + expected.abs())  # of softmax weights, and of the result
    assert_within(found.run(), expected, bound)


@pytest.mark.usefixtures("target")
@many
@given(layout=LAYOUTS, dtype=st.sampled_from([F32, BF16]), data=st.data())
def test_a_segment_gets_the_same_bits_alone_and_cut_anywhere(
    layout: Layout, dtype: torch.dtype, data: st.DataObject
) -> None:
    together = drawn(layout, dtype)
    expected = together.run()
    for segment, (_, length) in enumerate(layout.segments):
        cut = data.draw(st.integers(0, length))
        cuts = [0, cut, length]
        parts = [together.part(segment, a, b).run() for a, b in pairwise(cuts) if a < b]
        assert torch.equal(torch.cat(parts), expected[together.offsets[segment] : together.offsets[segment + 1]])


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("layout", [Layout(2, 3, 64, 16, [(0, 150), (190, 1), (70, 20)]), LATENTS], ids=["", "latents"])
def test_threads_change_no_bit(layout: Layout) -> None:
    batch = drawn(layout, BF16)
    expected = batch.run()
    for threads in (2, 3):
        cpp.use_threads(threads)
        assert torch.equal(batch.run(), expected)


@pytest.mark.usefixtures("target")
def test_other_layouts_are_refused() -> None:
    g = drawn(Layout(2, 3, 8, 4, [(3, 5)]), F32)
    others = [
        replace(g, keys=g.keys.transpose(1, 2)),
        replace(g, keys=g.keys.transpose(1, 2).contiguous().transpose(1, 2)),
        replace(g, values=g.values[..., ::2]),
        replace(g, values=g.values.repeat(1, 1, 1, 2)),
        replace(g, values=g.values[:, :2]),
        replace(g, table=g.table.repeat(2, 1)),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"are not pages|do not fit"):
            other.run()
