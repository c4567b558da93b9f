"""Operations on whole slots: Triton compared with the reference, and the reference with its definition."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool import reference, triton


@pytest.mark.parametrize("form", [reference, triton], ids=["reference", "triton"])
@given(
    moved=st.integers(0, 4),
    size=st.one_of(st.integers(1, 12), st.sampled_from([127, 128, 129, 300])),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20, deadline=None)
def test_the_four_operations(form: ModuleType, moved: int, size: int, seed: int) -> None:
    """Gather, copy, clear and scatter equal their definitions. size: bytes of a slot, in units of 64."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.randint(256, (2 * moved + 2, 64 * size), dtype=torch.uint8, generator=g)
    sources, targets = torch.randperm(len(pool), generator=g)[: 2 * moved].view(2, moved)
    expected = pool.clone()
    rows = form.gather(pool, sources)
    assert torch.equal(rows, expected[sources])
    assert torch.equal(pool, expected)
    form.copy(pool, sources, targets)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[target] = expected[source]
    assert torch.equal(pool, expected)
    form.clear(pool, sources)
    expected[sources.tolist()] = 0
    assert torch.equal(pool, expected)
    form.scatter(pool, targets, rows.bitwise_not())
    for row, target in zip(rows, targets.tolist(), strict=True):
        expected[target] = ~row
    assert torch.equal(pool, expected)


def test_padding_may_copy_a_slot_to_itself_and_clear_one_again() -> None:
    pool = torch.randint(256, (4, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = pool.clone()
    triton.copy(pool, torch.tensor([1, 3, 3]), torch.tensor([2, 3, 3]))
    assert torch.equal(pool, before[[0, 1, 1, 3]])
    triton.clear(pool, torch.tensor([3, 3, 0]))
    assert pool[[0, 3]].count_nonzero() == 0
    assert torch.equal(pool[1:3], before[[1, 1]])


@pytest.mark.parametrize("pool", [torch.zeros(2, 96, dtype=torch.uint8), torch.zeros(2, 64)])
def test_other_layouts_are_refused(pool: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="multiples of 64 bytes"):
        triton.clear(pool, torch.tensor([0]))
    with pytest.raises(ValueError, match="multiples of 64 bytes"):
        triton.gather(torch.zeros(64, 64, dtype=torch.uint8).t()[:, :64], torch.tensor([0]))


def test_each_is_one_launch_however_many_slots() -> None:
    """Each operation is one launch, even with more slots than the second dimension of a grid can have."""
    many, launches = torch.empty(100_000, dtype=torch.int64, device="meta"), []
    pool = torch.empty(9, 4096 * 64, dtype=torch.uint8, device="meta")
    with gpu.watched(launches.append):
        triton.copy(pool, many, many)
        triton.clear(pool, many)
        triton.scatter(pool, many, triton.gather(pool, many))
    assert [launch.grid for launch in launches] == [(100_000 * 32,)] * 4
