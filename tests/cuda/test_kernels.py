"""Triton kernels on a GPU equal their references, also in a CUDA graph, and rows do not affect each other's results."""

import pytest
import torch

from scripts.benchmarks.gpu.operation import Draw
from scripts.benchmarks.gpu.operations import attention, mamba2, quantized
from scripts.benchmarks.gpu.operations.attention import Heads
from scripts.benchmarks.gpu.operations.listed import CHECKED
from scripts.benchmarks.gpu.operations.mamba2 import Mixer
from scripts.benchmarks.gpu.timing import captured

CUDA = torch.device("cuda")
F32, BF16 = torch.float32, torch.bfloat16
SMALL = [name for name in CHECKED if name.endswith(", odd")]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_each_equals_its_reference(name: str, dtype: torch.dtype) -> None:
    assert CHECKED[name](Draw(CUDA, dtype, seed=7)).error(dtype) <= 1


@pytest.mark.parametrize("name", SMALL)
def test_each_is_the_same_bits_in_a_graph(name: str) -> None:
    first, second = (CHECKED[name](Draw(CUDA, BF16, seed=3)) for _ in range(2))
    found = list[torch.Tensor]()

    def run() -> None:
        found[:] = second.run(*second.inputs)

    before = [each.clone() for each in second.inputs]
    replay = captured([run])
    for each, original in zip(second.inputs, before, strict=True):
        each.copy_(original)
    replay()
    expected = first.run(*first.inputs)
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 2, 17, 60])
def test_a_decoding_row_is_the_same_bits_in_any_batch(rows: int) -> None:
    """A cached state can continue exactly as a recomputed one only because a row has the same bits in any batch."""
    draw = Draw(CUDA, BF16)
    mixed = mamba2.decode(draw, Mixer(), 64)
    projected, conv, pool, slots, positions, *constants = mixed.inputs
    before = conv.clone(), pool.clone()
    alone = mixed.run(projected[:rows], conv, pool, slots[:rows], positions[:rows], *constants)[0]
    conv.copy_(before[0])
    pool.copy_(before[1])
    assert torch.equal(alone, mixed.run(*mixed.inputs)[0][:rows])

    attended = attention.attend(draw, Heads(), [], [70 * row for row in range(64)])
    query, pages, table, offsets, starts = attended.inputs
    alone = attended.run(query[:rows], pages, table[:rows], offsets[: rows + 1], starts[:rows])[0]
    assert torch.equal(alone, attended.run(*attended.inputs)[0][:rows])

    linear = quantized.project(draw, 8, 64, 4096, 4480)
    x, *weight = linear.inputs
    assert torch.equal(linear.run(x[:rows], *weight)[0], linear.run(x, *weight)[0][:rows])
