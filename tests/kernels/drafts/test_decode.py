"""Decoding with drafts gives the bits of decoding one token at a time, whatever is accepted."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.drafts import MOST_DRAFTS, Drafts
from baton.kernels.drafts.native import feed_arguments
from baton.kernels.runtime import cpp
from tests.kernels.conftest import targets
from tests.kernels.drafts.layers import EVERY_LAYER, Make, assert_drafts_change_no_bit
from tests.kernels.installed import installed

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])


@pytest.fixture(params=[None, *targets()], ids=lambda target: target.name if target else "torch", scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with torch, and with this checkout's C++ for several instruction sets."""
    if request.param is None:
        cpp.uninstall()
        yield
    else:
        with installed(request.param):
            yield


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("make", EVERY_LAYER)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, states=DTYPES, rows=st.integers(1, 4))
def test_the_bits_are_those_of_one_token_at_a_time(
    make: Make, seed: int, dtype: torch.dtype, states: torch.dtype, rows: int
) -> None:
    assert_drafts_change_no_bit(make(seed, dtype, states, rows), rows, seed)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("make", EVERY_LAYER)
@pytest.mark.parametrize("rows", [1, 5])
def test_threads_change_no_bit(make: Make, rows: int) -> None:
    results = []
    for threads in (1, 3):
        layer = make(5, BF16, F32, rows)
        layer.ring[:] = 1.0
        drafts = Drafts.of([2] * rows, [4] * rows, range(rows))
        cpp.use_threads(threads)
        y = layer.feed(list(range(4 * rows)), torch.arange(rows), torch.arange(rows), drafts, layer.ring)
        results.append((y, *layer.pools, layer.ring))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_rings_that_do_not_fit_are_refused() -> None:
    drafts, projected = Drafts.of([0], [2], [0]), torch.zeros(2, 8)
    rings = [None, torch.zeros(1, 4, 7), torch.zeros(1, 4, 8, dtype=BF16), torch.zeros(1, MOST_DRAFTS + 1, 8)]
    for ring in rings:
        with pytest.raises(ValueError, match="ring"):
            feed_arguments(projected, 1, 8, drafts, ring)
    for too_many in (Drafts.of([0], [6], [0]), Drafts.of([5], [1], [0])):
        with pytest.raises(ValueError, match="5 drafts of a row in a ring for 4"):
            feed_arguments(projected, 1, 8, too_many, torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        feed_arguments(projected, 1, 8, None, None)
