"""The cache entries of latent attention, and projections of each head: in C++ and with torch."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.attention import mla_cache
from baton.kernels.attention.mla_cache import write_latents
from baton.kernels.linear import per_head
from baton.kernels.runtime import cpp
from tests.kernels.rounding import assert_rounded, norm_terms

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
many = settings(max_examples=40, deadline=None)
PAGES, PAGE, LAYERS = 5, 4, 3


def projected_heads(x: Tensor, weight: Tensor, passed: int) -> Tensor:
    """Compute head_linear with packed weights."""
    packed = per_head.pack(weight)
    assert packed is not None and packed.numel == weight.numel()
    return per_head.head_linear(x, packed, passed)


def drawn(seed: int, rows: int, heads: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random x [rows, heads, inputs + passed] and weight [heads, outputs, inputs].

    sizes: (inputs, outputs, passed); `passed` columns follow the inputs in each row of x.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, sizes[0] + sizes[2], generator=g).to(dtype)
    return x, torch.randn(heads, sizes[1], sizes[0], generator=g).to(dtype)


SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 70), st.integers(0, 9))


@pytest.mark.usefixtures("target")
@many
@given(seed=st.integers(0, 99), rows=st.integers(1, 100), heads=st.integers(1, 4), sizes=SHAPES, dtype=DTYPES)
def test_each_head_is_projected_by_its_own_weight(
    seed: int, rows: int, heads: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight = drawn(seed, rows, heads, sizes, dtype)
    inputs, outputs, passed = sizes
    numbers = x[..., :inputs].double(), weight.double()
    exact, size = (torch.einsum("thi,hoi->tho", *operands) for operands in (numbers, map(torch.abs, numbers)))
    for found in (
        projected_heads(x, weight, passed),
        per_head.head_linear(x, weight, passed),
        per_head.reference.head_linear(x, weight, passed),
    ):
        assert found.dtype == dtype and found.shape == (rows, heads, outputs + passed)
        assert_rounded(found[..., :outputs], exact, inputs, size)
        assert torch.equal(found[..., outputs:], x[..., inputs:])


@pytest.mark.usefixtures("target")
@many
@given(rows=st.integers(2, 40), heads=st.integers(1, 4), sizes=SHAPES, dtype=DTYPES)
def test_a_row_gets_the_same_alone_beside_others_and_apart_in_memory(
    rows: int, heads: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight = drawn(0, rows, heads, sizes, dtype)
    together = projected_heads(x, weight, sizes[2])
    assert all(torch.equal(projected_heads(x[i : i + 1], weight, sizes[2])[0], together[i]) for i in range(rows))
    wide = torch.full((rows, heads + 1, x.shape[2] + 3), torch.nan, dtype=dtype)
    wide[:, :heads, : x.shape[2]] = x
    assert torch.equal(projected_heads(wide[:, :heads], weight, sizes[2]), together)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 70])
def test_threads_change_no_bit(dtype: torch.dtype, rows: int) -> None:
    x, weight = drawn(0, rows, 8, (128, 512, 64), dtype)
    results = []
    for threads in (1, 2, 3):
        cpp.use_threads(threads)
        results.append(projected_heads(x, weight, 64))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("native_kernels")
def test_heads_that_do_not_fit_are_refused() -> None:
    x, weight = drawn(0, 3, 2, (8, 5, 0), F32)
    packed = per_head.pack(weight)
    assert packed is not None
    for given_x, passed in ((x.bfloat16(), 0), (x[:, :1], 0), (x, 1), (x[..., :7], 0)):
        with pytest.raises(ValueError, match="for 2 heads of 8 inputs"):
            per_head.head_linear(given_x, packed, passed)


def definition(projected: Tensor, weight: Tensor, eps: float) -> Tensor:
    rank = len(weight)
    x = projected[:, :rank].double()
    normed = weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return torch.cat([normed, projected[:, rank:].double()], dim=1)


@pytest.mark.usefixtures("target")
@many
@given(
    tokens=st.integers(1, 20), rank=st.integers(1, 70), shared=st.integers(0, 9), dtype=DTYPES, seed=st.integers(0, 9)
)
def test_latents_are_normed_and_written_to_their_places_and_nothing_else(
    tokens: int, rank: int, shared: int, dtype: torch.dtype, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, rank + shared + 5, generator=g).to(dtype)
    projected, weight = wide[:, 2 : 2 + rank + shared], torch.randn(rank, generator=g).to(dtype)
    places = torch.randperm(PAGES * PAGE, generator=g)[:tokens]
    blocks = torch.randn(PAGES, LAYERS, PAGE, 1, rank + shared, generator=g).to(dtype)
    assert mla_cache.native.takes(projected, weight, 1e-5, blocks[:, 1])
    for write in (write_latents, mla_cache.reference.write_latents):
        found = blocks.clone()
        write(projected, weight, 0.01, found[:, 1], places)
        written = found[places // PAGE, 1, places % PAGE, 0]
        assert_rounded(written, definition(projected, weight, 0.01), norm_terms(rank))
        assert torch.equal(written[:, rank:], projected[:, rank:])
        found[places // PAGE, 1, places % PAGE, 0] = blocks[places // PAGE, 1, places % PAGE, 0]
        assert torch.equal(found, blocks)


@pytest.mark.usefixtures("native_kernels")
def test_a_token_gets_the_same_latent_beside_any_others() -> None:
    g = torch.Generator().manual_seed(0)
    projected, weight = torch.randn(9, 45, generator=g), torch.randn(37, generator=g)
    together, alone = torch.zeros(2, 3, PAGE, 1, 45)
    write_latents(projected, weight, 1e-6, together, torch.arange(9))
    for token in range(9):
        write_latents(projected[token, None], weight, 1e-6, alone, torch.tensor([token]))
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("native_kernels")
def test_other_pages_and_places_are_refused() -> None:
    projected, weight, pages, places = torch.zeros(2, 6), torch.ones(4), torch.zeros(3, PAGE, 1, 6), torch.arange(2)
    for given_pages, given_weight, given_places, fault in [
        (pages[..., :5], weight, places, "are not pages of 6"),
        (pages.transpose(1, 3), weight, places, "are not pages of 6"),
        (pages, torch.ones(7), places, "for latents of 6"),
        (pages, weight, places.int(), "int64"),
        (pages, weight, places[:1], "int64"),
    ]:
        with pytest.raises(ValueError, match=fault):
            write_latents(projected, given_weight, 1e-6, given_pages, given_places)
