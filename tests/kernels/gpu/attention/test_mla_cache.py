"""Writing latents (cache entries of latent attention) in Triton: equal to the reference, and nothing else changes."""

import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.attention.mla_cache import reference, triton, write_latents
from baton.kernels.runtime import triton as gpu
from tests.kernels.rounding import assert_rounded, assert_within, norm_terms, unit

PAGES, PAGE, LAYERS = 5, 4, 3


@given(
    tokens=st.integers(0, 6),
    rank=st.integers(1, 130),
    shared=st.integers(0, 9),
    is_rounded=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_equals_the_reference_and_writes_nothing_else(
    tokens: int, rank: int, shared: int, is_rounded: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(tokens, rank + shared + 5, generator=g)[:, 2 : 2 + rank + shared]
    weight, places = torch.randn(rank, generator=g), torch.randperm(PAGES * PAGE, generator=g)[:tokens]
    blocks = torch.randn(PAGES, LAYERS, PAGE, 1, rank + shared, generator=g)
    if is_rounded:
        projected, weight, blocks = projected.bfloat16(), weight.bfloat16(), blocks.bfloat16()
    expected = blocks.clone()
    triton.write_latents(projected, weight, 0.01, blocks[:, 1], places)
    reference.write_latents(projected, weight, 0.01, expected[:, 1], places)
    written = places // PAGE, 1, places % PAGE, 0
    if is_rounded:  # the interpreter truncates to bfloat16, a GPU rounds
        assert_within(blocks[written], expected[written], 2 * unit(torch.bfloat16) * expected[written].double().abs())
    else:
        assert_rounded(blocks[written], expected[written], norm_terms(rank))
    assert torch.equal(blocks[written][:, rank:], projected[:, rank:])
    blocks[written] = expected[written]
    assert torch.equal(blocks, expected)


def test_triton_is_used_where_it_computes() -> None:
    projected, weight, places = torch.randn(3, 11), torch.randn(8), torch.tensor([4, 1, 6])
    found, expected = torch.zeros(2, 2, PAGE, 1, 11)
    with gpu.computes_for("cpu"):
        write_latents(projected, weight, 1e-6, found, places)
    triton.write_latents(projected, weight, 1e-6, expected, places)
    assert torch.equal(found, expected) and found.any()
