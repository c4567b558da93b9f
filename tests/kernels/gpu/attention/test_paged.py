"""Paged attention in Triton: equal to the reference, and batch-invariant, whatever the width of the page table."""

from dataclasses import dataclass, replace
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.attention.paged import reference, triton
from tests.kernels.rounding import assert_within, attention_error


@dataclass
class Case:
    """A batch of prompts, followed by decoding rows. Page entries that belong to neither are NaN."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    table: Tensor
    lengths: list[int]
    starts: list[int]
    prompts: int
    window: int = 0

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def run(self) -> Tensor:
        longest = max(self.lengths[: self.prompts], default=0)
        return triton.paged_attention(*self._arguments(), self.prompts, longest, self.window)

    def expected(self) -> Tensor:
        return reference.paged_attention(*self._arguments(), window=self.window)

    def assert_attends(self) -> None:
        """Compare with the reference."""
        tokens = max(start + length for start, length in zip(self.starts, self.lengths, strict=True))
        error = attention_error(self.query, self.key_pages, self.value_pages, 0.2, tokens)
        assert_within(self.run(), self.expected(), 2 * error)

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        pages = (self.query, self.key_pages, self.value_pages, self.table)
        return *pages, self.offsets, torch.tensor(self.starts), 0.2

    def only(self, segment: int) -> "Case":
        """Return this segment alone, with a page table that is as narrow as possible."""
        end = self.starts[segment] + self.lengths[segment]
        width = -(-end // self.key_pages.shape[1])
        return replace(
            self,
            query=self.query[self.offsets[segment] : self.offsets[segment + 1]],
            table=self.table[segment : segment + 1, :width],
            lengths=[self.lengths[segment]],
            starts=[self.starts[segment]],
            prompts=int(segment < self.prompts),
        )


def case(
    prompts: list[tuple[int, int]],
    positions: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    value_width: int | None = None,
    page: int = 16,
    spare: int = 1,
    window: int = 0,
    seed: int = 0,
) -> Case:
    """Return a random case.

    prompts: (start, length) of each prompt. positions: position of each decoding row.
    value_width: if set, the width of values that are the first columns of pages as wide as the keys' pages.
    spare: additional entries in each row of the page table, which name no page.
    """
    g = torch.Generator().manual_seed(seed)
    starts, lengths = [s for s, _ in prompts] + positions, [n for _, n in prompts] + [1] * len(positions)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    size = max(-(-end // page) for end in ends)
    memory = torch.full((len(ends) * size + 3, 2, page * kv_heads * width + 8), torch.nan)
    pages = memory[:, :, 4:-4].unflatten(2, (page, kv_heads, width))
    table = torch.randperm(len(pages), generator=g)[: len(ends) * size].view(len(ends), size).int()
    for row, end in zip(table, ends, strict=True):
        for place in range(0, end, page):
            some = min(page, end - place)
            pages[row[place // page], :, :some] = torch.randn(2, some, kv_heads, width, generator=g)
    wide = torch.full((len(ends), size + spare), 2**30, dtype=torch.int32)
    for row, named, end in zip(wide, table, ends, strict=True):
        row[: -(-end // page)] = named[: -(-end // page)]
    projected = torch.randn(sum(lengths), (heads + 2 * kv_heads) * width, generator=g)
    query = projected[:, : heads * width].unflatten(1, (heads, width))
    return Case(query, pages[:, 0], pages[:, 1, ..., :value_width], wide, lengths, starts, len(prompts), window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    segment = st.tuples(st.integers(0, 50), st.integers(1, 40))
    prompts = draw(st.lists(segment, max_size=2))
    positions = draw(st.lists(st.integers(0, 300), min_size=not prompts, max_size=3))
    kv_heads, width = draw(st.integers(1, 2)), draw(st.sampled_from([4, 16, 20, 64, 300]))
    return case(
        prompts,
        positions,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        kv_heads=kv_heads,
        width=width,
        value_width=draw(st.one_of(st.none(), st.integers(1, width))),
        page=draw(st.sampled_from([1, 3, 16, 100])),
        spare=draw(st.integers(0, 40)),
        window=draw(st.one_of(st.just(0), st.integers(1, 320))),
        seed=draw(st.integers(0, 2**32)),
    )


@given(drawn=cases())
@settings(max_examples=20, deadline=None)
def test_equals_the_reference(drawn: Case) -> None:
    drawn.assert_attends()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 1, 128), (40, 1, 16), (1, 1, 80), (2, 1, 256)])
def test_equals_the_reference_in_the_shapes_of_models(heads: int, kv_heads: int, width: int) -> None:
    drawn = case([(37, 9), (0, 5)], [0, 70], heads=heads, kv_heads=kv_heads, width=width)
    drawn.assert_attends()


@pytest.mark.parametrize(("heads", "width", "rank"), [(5, 300, 300), (32, 576, 512), (70, 576, 512), (2, 1024, 999)])
def test_latents_that_all_heads_share_and_whose_first_columns_are_the_values(heads: int, width: int, rank: int) -> None:
    drawn = case([(0, 5), (20, 9)], [3, 300], heads=heads, kv_heads=1, width=width)
    drawn = replace(drawn, value_pages=drawn.key_pages[..., :rank])
    drawn.assert_attends()


@pytest.mark.parametrize(("width", "value_width"), [(20, 9), (128, 80), (300, 17), (600, 600)])
@pytest.mark.parametrize("is_apart", [True, False])
def test_values_narrower_than_keys_in_wider_pages_and_in_their_own(
    width: int, value_width: int, is_apart: bool
) -> None:
    drawn = case([(30, 9)], [3, 270], heads=6, width=width, value_width=value_width, page=24)
    if not is_apart:
        drawn = replace(drawn, value_pages=drawn.value_pages.contiguous())
    drawn.assert_attends()


@pytest.mark.parametrize("position", [0, 254, 255, 256, 511, 512, 1000])
def test_a_decoding_row_of_any_length_is_split_and_combined(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a row have 256 positions. As a row has two parts at most, parts are longer above length 512."""
    monkeypatch.setattr(triton, "PARTS", 2)
    drawn = case([], [position], heads=3, kv_heads=1)
    drawn.assert_attends()


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 128, 129, 1000])
def test_positions_before_a_tokens_window_are_not_seen(window: int) -> None:
    case([(0, 40), (121, 30)], [5, 15, 16, 127, 128, 300], width=20, window=window).assert_attends()


@pytest.mark.parametrize("window", [1, 255, 256, 257, 600])
def test_the_positions_of_a_window_are_split_and_combined(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin at multiples of 128, and have 256 positions or more, because a row has two parts at most."""
    monkeypatch.setattr(triton, "PARTS", 2)
    case([], [255, 256, 383, 511, 767, 900], heads=3, kv_heads=1, window=window).assert_attends()


def test_pages_before_the_block_in_which_a_window_begins_are_not_read() -> None:
    """Every block size divides 64. Pages have 16 positions."""
    drawn = case([(300, 9)], [300, 385], window=45)
    expected = drawn.run()
    for row, first_seen in zip(drawn.table, [256, 256, 341], strict=True):
        row[: first_seen // 64 * 4] = 2**30
    assert torch.equal(drawn.run(), expected)


@given(drawn=cases())
@settings(max_examples=6, deadline=None)
def test_a_segments_result_is_the_same_alone_and_with_a_narrow_table(drawn: Case) -> None:
    together = drawn.run()
    for segment in range(len(drawn.lengths)):
        alone = drawn.only(segment).run()
        assert torch.equal(alone, together[drawn.offsets[segment] : drawn.offsets[segment + 1]])


def test_a_decoding_rows_result_does_not_depend_on_how_many_programs_share_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = case([], [900, 3, 600])
    together = drawn.run()
    monkeypatch.setattr(triton, "PROGRAMS", 1)
    assert torch.equal(drawn.run(), together)


@pytest.mark.parametrize("window", [0, 20])
def test_a_prompts_result_is_the_same_in_pieces(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt fed in pieces, which begin anywhere within a block, has the result of the whole prompt.

    einsum replaces numpy's matmul so that, as on a GPU, a row's product does not depend on its place in the tile.
    """
    monkeypatch.setattr(numpy, "matmul", partial(numpy.einsum, "ik,kj->ij"))
    whole = case([(0, 100)], [], heads=6, window=window)
    pieces = []
    for start, stop in [(0, 1), (1, 30), (30, 79), (79, 100)]:
        lengths, starts = [stop - start], [start]
        pieces.append(replace(whole, query=whole.query[start:stop], lengths=lengths, starts=starts).run())
    assert torch.equal(torch.cat(pieces), whole.run())


def test_rows_that_share_a_page_for_padding_leave_the_others_alone() -> None:
    drawn = case([], [40, 7, 500])
    padded = replace(
        drawn,
        query=torch.cat([drawn.query, drawn.query[:2]]),
        table=torch.cat([drawn.table, drawn.table[:1].expand(2, -1)]),
        lengths=[*drawn.lengths, 1, 1],
        starts=[*drawn.starts, 0, 0],
    )
    found = padded.run()
    assert torch.equal(found[:3], drawn.run())
    assert found.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero_neither_overflow_nor_vanish(sign: int) -> None:
    """All scores of a row are large and have the same sign."""
    drawn = case([(9, 40)], [300])
    far = replace(drawn, query=drawn.query.abs() * sign * 1e3, key_pages=drawn.key_pages.abs())
    far.assert_attends()


def test_other_layouts_are_refused() -> None:
    drawn = case([(9, 4)], [3])
    with pytest.raises(ValueError, match="do not fit"):
        replace(drawn, key_pages=drawn.key_pages[:, :, :, :8]).run()
    with pytest.raises(ValueError, match="do not fit"):
        replace(drawn, value_pages=drawn.value_pages.repeat(1, 1, 1, 2)).run()
    with pytest.raises(ValueError, match="contiguous"):
        replace(drawn, value_pages=drawn.value_pages[..., ::2]).run()
    with pytest.raises(ValueError, match="contiguous"):
        replace(drawn, query=drawn.query.transpose(0, 1).contiguous().transpose(0, 1)).run()
