from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import conv1d_prefill, conv1d_update
from baton.kernels.prefill.convolution import plan_conv
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.rounding import SIGMOID, assert_rounded


def token_by_token(
    x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, packed: Packed,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pool, y = pool.clone(), torch.empty_like(x)
    for segment, slot in enumerate(packed.slots):
        history = pool[slot].clone()
        for token in range(packed.offsets[segment], packed.offsets[segment + 1]):
            window = torch.cat([history, x[token][None]])
            y[token] = activation((window * taps).sum(0) + (0 if bias is None else bias))
            history = window[1:]
            position = packed.starts[segment] + token - packed.offsets[segment] + 1
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position):
                    pool[target] = history
        pool[slot] = history
    return y, pool


def assert_convolved(
    found: Tensor, exact: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, packed: Packed
) -> None:
    """Compare two results for these inputs and the pool before: silu(s), of slope below 1.1, where s is a sum."""
    size, _ = token_by_token(x.abs(), taps.abs(), None if bias is None else bias.abs(), pool.abs(), packed, torch.abs)
    assert_rounded(found, exact, len(taps) + 1 + SIGMOID, 1.1 * size)


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_packed_prefill_equals_the_convolution_token_by_token(seed: int, kernel: int) -> None:
    packed = random_packed(seed) if seed else pack([70], [3], [(0, 4), (0, 50)])
    torch.manual_seed(seed)
    x, taps, pool = (
        torch.randn(packed.tokens, 5),
        torch.randn(kernel, 5),
        torch.randn(packed.pool_size, kernel - 1, 5),
    )
    bias = torch.randn(5) if seed % 2 else None
    expected_y, expected_pool = token_by_token(x, taps, bias, pool, packed)
    plan = plan_conv(packed.offsets, packed.starts, packed.slots, packed.checkpoints, kernel, torch.device("cpu"))
    before = pool.clone()
    assert_convolved(conv1d_prefill(x, taps, bias, pool, plan), expected_y, x, taps, bias, before, packed)
    assert torch.equal(pool, expected_pool)


def test_update_feeds_one_token_to_each_row() -> None:
    torch.manual_seed(0)
    x, taps, bias, pool = torch.randn(3, 5), torch.randn(4, 5), torch.randn(5), torch.randn(6, 3, 5)
    packed = Packed([0, 1, 2, 3], [9, 0, 4], [4, 0, 5], [], 6)
    expected_y, expected_pool = token_by_token(x, taps, bias, pool, packed)
    before = pool.clone()
    y = conv1d_update(x, taps, bias, pool, torch.tensor(packed.slots))
    assert_convolved(y, expected_y, x, taps, bias, before, packed)
    assert torch.equal(pool, expected_pool)


def test_bfloat16_inputs_are_kept_exactly_in_the_state() -> None:
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool = torch.zeros(2, 3, 5)
    plan = plan_conv([0, 9], [0], [1], [(0, 6, 0)], 4, torch.device("cpu"))
    conv1d_prefill(x, torch.ones(4, 5), None, pool, plan)
    assert torch.equal(pool[1], x[6:9].float())
    assert torch.equal(pool[0], x[3:6].float())
