"""Attention over latents by heads in Triton: equal to the reference and to the absorbed form, whatever the blocks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.kernels.attention.latents import reference, sizes, triton
from baton.kernels.attention.paged import reference as paged
from tests.kernels.rounding import assert_within, attention_error

SCALE = 0.2


@dataclass
class Case:
    """A segment of a batch, which has two more tokens before it and three after it; all other memory is NaN."""

    query: Tensor
    latents: Tensor
    pages: Tensor
    weights: tuple[Tensor, Tensor]
    length: int
    start: int

    def run(self, attend: object = triton.attend_by_heads) -> Tensor:
        output = torch.full((self.length + 5, self.query.shape[1], self.weights[1].shape[1]), torch.nan)
        place = (2, self.length, self.start)
        attend(self.query, self.latents, self.pages, *self.weights, SCALE, *place, output)  # type: ignore[operator]
        assert output[:2].isnan().all()
        assert output[2 + self.length :].isnan().all()
        return output[2 : 2 + self.length]

    def absorbed(self) -> Tensor:
        """Return the same in the absorbed form, in float64."""
        keys, values = (weight.double() for weight in self.weights)
        rank, own = keys.shape[1:]
        query = self.query[2 : 2 + self.length].double()
        latents = self.latents.double()
        wide = torch.cat([torch.einsum("tho,hro->thr", query[..., :own], keys), query[..., own:]], dim=2)
        layout = (self.pages[None], torch.tensor([0, self.length]), torch.tensor([self.start]))
        attended = paged.paged_attention(wide, latents, latents[..., :rank], *layout, SCALE)
        return torch.einsum("thr,hvr->thv", attended, values)

    def error(self) -> float:
        """Return the largest likely error: twice that of attention, as keys and values are sums of products too."""
        rank = self.weights[0].shape[1]
        latents = self.latents.nan_to_num(0.0)
        keys = torch.einsum("...xr,hro->...ho", latents[..., :rank], self.weights[0])
        keys = torch.cat([keys, latents[..., rank:].expand(*keys.shape[:-1], -1)], dim=-1)
        values = torch.einsum("...xr,hvr->...hv", latents[..., :rank], self.weights[1])
        return 2 * attention_error(self.query, keys, values, SCALE, self.start + self.length)


def case(
    start: int, length: int, *, heads: int = 3, own: int = 16, shared: int = 8, value: int = 16, rank: int = 32,
    page: int = 16, seed: int = 0,
) -> Case:  # fmt: skip
    """Return a random case. The page table has two more entries than the segment needs, which name no page."""
    g, end = torch.Generator().manual_seed(seed), start + length
    count = -(-end // page)
    memory = torch.full((count + 3, 2, page, 1, rank + shared), torch.nan)
    order = torch.randperm(count + 3, generator=g)[:count]
    stored = torch.full((count * page, rank + shared), torch.nan)
    stored[:end] = torch.randn(end, rank + shared, generator=g)
    memory[order, 1] = stored.view(count, page, 1, rank + shared)
    weights = torch.randn(heads, rank, own, generator=g), torch.randn(heads, value, rank, generator=g)
    query = torch.full((length + 5, heads, own + shared), torch.nan)
    query[2 : 2 + length] = torch.randn(length, heads, own + shared, generator=g)
    table = torch.cat([order, torch.tensor([2**30, 2**30])]).int()
    return Case(query, memory[:, 1], table, (weights[0] * rank**-0.5, weights[1] * rank**-0.5), length, start)


def assert_right(drawn: Case) -> None:
    """Compare with the reference, which is computed in float32, and with the absorbed form."""
    found = drawn.run()
    assert_within(found, drawn.run(reference.attend_by_heads), 2 * drawn.error())
    assert_within(found, drawn.absorbed(), drawn.error())


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 40), (0, 64), (5, 40), (100, 33), (128, 1)])
def test_equals_the_reference_and_the_absorbed_form(start: int, length: int) -> None:
    assert_right(case(start, length))


@pytest.mark.parametrize(
    ("start", "length", "page"), [(0, 200, 16), (64, 70, 16), (63, 3, 16), (200, 40, 24), (10, 100, 100), (0, 65, 1)]
)
def test_positions_in_several_blocks(start: int, length: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have 64 positions, or as many whole pages as fit into 64, or one page."""
    monkeypatch.setattr(sizes, "POSITIONS", 64)
    assert_right(case(start, length, page=page))


@pytest.mark.parametrize(
    ("heads", "own", "shared", "value", "rank"), [(2, 128, 64, 128, 512), (3, 7, 2, 9, 13), (1, 40, 0, 72, 50)]
)
def test_the_shapes_of_models_and_odd_ones(heads: int, own: int, shared: int, value: int, rank: int) -> None:
    assert_right(case(9, 40, heads=heads, own=own, shared=shared, value=value, rank=rank))


def test_large_scores_neither_overflow_nor_vanish_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "POSITIONS", 32)
    drawn = case(20, 100)
    drawn.query *= 1e3
    assert_within(drawn.run(), drawn.run(reference.attend_by_heads), 2 * drawn.error())


def test_kimis_segments_of_171_tokens_are_the_shortest_that_pay() -> None:
    """171 · 768 columns of products saved by each position exceed the 512 · 256 that expand it; 170 · 768 do not."""
    forms = sizes.forms_of(rank=512, own=128, shared=64, value=128)
    assert forms is not None
    assert forms.shortest == 171
    assert not sizes.is_long(forms.shortest, 170)
    assert sizes.is_long(forms.shortest, 171)
    # Queries and sums of as many columns as 8,192 expanded keys and values have: 8,192 · 256 / 1,088.
    assert forms.absorbed == 1927


@pytest.mark.parametrize("sizes_of", [(100, 128, 64, 128), (512, 256, 64, 128), (512, 64, 64, 300)])
def test_narrow_latents_and_wide_heads_always_stay_absorbed(sizes_of: tuple[int, int, int, int]) -> None:
    assert sizes.forms_of(*sizes_of) is None
