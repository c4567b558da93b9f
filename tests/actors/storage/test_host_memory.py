"""Copies in host memory: converting KV from pages to tokens, and from tokens to pages."""

import pytest
import torch

from baton.actors.storage.host_memory import HostStates
from baton.models.batch import Pools, TensorSpec, stretches
from tests.actors.storage.host import PAGE, buffer

CPU = torch.device("cpu")
SPECS = [
    TensorSpec((PAGE, 3, 2), torch.float32),
    TensorSpec((PAGE, 5), torch.bfloat16),
    TensorSpec((PAGE,), torch.int8),
]


def pools_and_host() -> tuple[Pools, HostStates]:
    slots, state = stretches(1, [TensorSpec((4,), torch.float32)], CPU)
    blocks, pages = stretches(4, SPECS, CPU)
    pools, host = Pools(slots, blocks, state, pages, PAGE), HostStates()
    host.use(pools, buffer)
    return pools, host


@pytest.mark.parametrize("position", [0, 1, 2, 5, 8])
def test_the_kv_by_token_is_that_of_the_pages_and_back(position: int) -> None:
    pools, host = pools_and_host()
    generator = torch.Generator().manual_seed(position)
    for tensor in pools.pages:
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    copy = host.room(position)
    assert len(copy.blocks) == -(-position // PAGE) and len(copy.state) == 64
    copy.blocks[:] = pools.blocks[: len(copy.blocks)]
    kv = host.kv_of(copy)
    for found, tensor in zip(kv, pools.pages, strict=True):
        assert torch.equal(found, tensor.flatten(0, 1)[:position]) and found.dtype == tensor.dtype
    again = host.from_kv(position, pools.slots[0], kv)
    assert again.position == position and torch.equal(again.state, pools.slots[0])
    for found, brought in zip(kv, host.kv_of(again), strict=True):
        assert torch.equal(found, brought)
