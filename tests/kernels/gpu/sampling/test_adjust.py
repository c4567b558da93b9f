"""Penalties, biases and counts in Triton: equal to the reference, and nothing else is changed."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.runtime.triton import KernelConfig
from baton.kernels.sampling import TokenCounts, apply_bias, apply_penalties, reference, triton_adjust
from tests.kernels.rounding import assert_rounded, largest


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_adjust, "PENALTIES_CONFIG", KernelConfig({"BLOCK": 16}))
        patch.setattr(triton_adjust, "MASKS_CONFIG", KernelConfig({"BLOCK": 16}))
        patch.setattr(triton_adjust, "ENTRIES_CONFIG", KernelConfig({"BLOCK": 4}))
        yield


@given(rows=st.integers(1, 5), more=st.integers(0, 3), vocab_size=st.integers(1, 70), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_penalties_are_the_references(rows: int, more: int, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(low: float, high: float) -> torch.Tensor:
        return torch.rand(rows, generator=generator) * (high - low) + low

    wide = torch.randn(rows + more, vocab_size + 9, generator=generator) * 4
    wide[0, 0] = -math.inf
    prompt_seen = torch.rand(rows + more, vocab_size, generator=generator) < 0.3
    counts = torch.randint(-4, 4, (rows + more, vocab_size), generator=generator, dtype=torch.int32).clamp_(min=0)
    at, lines = (torch.randperm(rows + more, generator=generator)[:rows] for _ in range(2))
    penalties = random(0.5, 2.0), random(-1.0, 1.0), random(0.0, 1.0)
    found, expected = wide.clone(), wide.clone()
    triton_adjust.apply_penalties(found[:, :vocab_size], at, prompt_seen, counts, lines, *penalties)
    apply_penalties(expected[:, :vocab_size], at, prompt_seen, counts, lines, *penalties)
    assert_rounded(found, expected, 5, largest(expected) + 4)  # a repetition penalty, and up to 3 frequencies and 1
    untouched = torch.ones_like(wide, dtype=torch.bool)
    untouched[at, :vocab_size] = ~(prompt_seen | (counts > 0))[lines]
    assert torch.equal(found[untouched], wide[untouched])


@given(entries=st.integers(0, 11), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_biases_and_counts_are_the_references(entries: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(5 * 13, generator=generator)[:entries]
    rows, tokens, addends = places // 13, places % 13, torch.randn(entries, generator=generator)
    # Up to three tokens are banned (biased by -inf) in addition to another bias.
    rows, tokens = (torch.cat((of, of[:3])) for of in (rows, tokens))
    addends = torch.cat((addends, torch.full((min(entries, 3),), -math.inf)))
    wide = torch.randn(5, 20, generator=generator)
    found = triton_adjust.apply_bias(wide.clone()[:, 2:15], rows, tokens, addends)
    assert torch.equal(found, apply_bias(wide.clone()[:, 2:15], rows, tokens, addends))

    counts = TokenCounts(13, torch.device("cpu"))
    for _ in range(5):
        counts.open(tokens[:0], tokens[:2])
    before = counts.output_counts.clone()
    counts.add(rows, tokens)
    triton_adjust.count(before, rows, tokens)
    assert torch.equal(before, counts.output_counts)


@given(rows=st.integers(1, 4), more=st.integers(0, 3), vocab_size=st.integers(1, 70), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_masks_are_the_references(rows: int, more: int, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows + more, vocab_size + 9, generator=generator)
    for odd in (math.nan, math.inf, -math.inf):
        wide[torch.rand(wide.shape, generator=generator) < 0.1] = odd
    at = torch.randperm(rows + more, generator=generator)[:rows]
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=torch.int32, generator=generator)
    found, expected = wide.clone(), wide.clone()
    triton_adjust.apply_masks(found[:, :vocab_size], at, words)
    reference.apply_masks(expected[:, :vocab_size], at, words)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)) and found.isnan().equal(wide.isnan())
