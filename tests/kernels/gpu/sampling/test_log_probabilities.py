"""Log probabilities in Triton: the same numbers as the reference, and the same order of ties."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.runtime.triton import KernelConfig
from baton.kernels.sampling import reference, triton_log_probabilities
from baton.kernels.sampling.triton_log_probabilities import log_probabilities
from tests.kernels.rounding import FUNCTION, assert_rounded, largest


@pytest.fixture(autouse=True, scope="module")
def small_splits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_log_probabilities, "SPLIT_CONFIG", KernelConfig({"SPLIT": 16}))
        yield


@given(
    rows=st.integers(0, 3),
    vocab_size=st.integers(1, 90),
    top=st.integers(0, 24),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    grid=st.sampled_from([0.0, 0.5]),
    banned=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_equal_the_reference(
    rows: int, vocab_size: int, top: int, spread: float, grid: float, banned: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, vocab_size + 3, generator=generator) * spread
    if grid:
        wide = (wide * grid).round() / grid
    wide.masked_fill_(torch.rand(wide.shape, generator=generator) < banned, -math.inf)
    wide[:, 0] = 0.0
    logits, tokens = wide[:, :vocab_size], torch.randint(vocab_size, (rows,), generator=generator)
    found, expected = log_probabilities(logits, tokens, top), reference.log_probabilities(logits, tokens, top)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert_rounded(one, other, vocab_size + 2 * FUNCTION + 1, largest(logits))
    assert found[2].tolist() == expected[2].tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, 69, 0])
    together = log_probabilities(logits, tokens, 5)
    for row in range(3):
        alone = log_probabilities(logits[row : row + 1], tokens[row : row + 1], 5)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))
