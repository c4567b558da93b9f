"""Memory in huge pages."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.kernels.linear import quantized
from baton.kernels.linear.dense import native
from baton.kernels.linear.per_head import native as per_head
from baton.kernels.runtime import memory
from baton.kernels.runtime.memory import HUGE_PAGE
from baton.models.batch import zeros

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("nbytes", [1, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE // 2, 0])
def test_mapped_memory_holds_zeros_and_begins_with_a_huge_page(nbytes: int) -> None:
    found = memory.mapped(nbytes)
    assert found.shape == (nbytes,) and not found.any()
    assert nbytes < HUGE_PAGE // 2 or found.data_ptr() % HUGE_PAGE == 0
    assert bool(found.fill_(7).eq(7).all())


def test_what_the_system_refuses_is_an_error() -> None:
    with pytest.raises(OSError):
        memory.mapped(2**60)


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_the_system_is_asked_for_huge_pages_that_are_mostly_used() -> None:
    assert asks_for_huge_pages(memory.mapped(HUGE_PAGE - 12345)[-1:])
    larger = memory.mapped(2 * HUGE_PAGE + 12345)
    assert asks_for_huge_pages(larger) and not asks_for_huge_pages(larger[-1:])
    assert not asks_for_huge_pages(memory.mapped(12345))


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_packed_weights_are_in_huge_pages() -> None:
    weight = torch.randn(1024, 2048).bfloat16()
    assert asks_for_huge_pages(native.packed(weight))
    assert asks_for_huge_pages(quantized.quantize(weight, 8).data)
    heads = native.packed(weight.view(4, 256, 2048)[0]), per_head.pack(weight.view(4, 256, 2048)).data
    assert [asks_for_huge_pages(data) for data in heads] == [False, True]


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_pools_are_in_huge_pages() -> None:
    assert asks_for_huge_pages(zeros(2 * HUGE_PAGE, torch.device("cpu")))


def test_small_tensors_share_pages_and_tensors_of_a_gpu_are_its_own() -> None:
    assert memory.empty(1000, dtype=torch.uint8).shape == (1000,)
    assert memory.empty(2 * HUGE_PAGE, dtype=torch.uint8, device=torch.device("meta")).is_meta


@pytest.mark.parametrize("rows", [3, 700_000])
def test_joined_and_stacked_tensors_are_those_of_torch(rows: int) -> None:
    parts = [torch.arange(3 * rows).view(rows, 3).short() + i for i in range(2)]
    assert torch.equal(memory.joined(parts), torch.cat(parts))
    assert torch.equal(memory.stacked(parts), torch.stack(parts))
    assert torch.equal(memory.joined([parts[0], parts[1][:1]]), torch.cat([parts[0], parts[1][:1]]))


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """Return whether the mapping that holds a tensor has the flag `hg`, as /proc/self/smaps shows it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    return False
