"""The operations of scripts/bench gpu: at toy sizes in Triton's interpreter, at real sizes on the meta device."""

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from baton.kernels.runtime.triton import Launch, watched
from scripts.benchmarks.gpu.operation import Draw, Operation
from scripts.benchmarks.gpu.operations.listed import CHECKED, TIMED, TOYS, Build

CPU, META = torch.device("cpu"), torch.device("meta")
F32, BF16 = torch.float32, torch.bfloat16


def launched(builds: Iterable[Build], dtype: torch.dtype = F32) -> set[str]:
    """Run the operations on meta tensors, and return the names of all kernels that they launch."""
    found = list[Launch]()
    with watched(found.append):
        for build in builds:
            operation = build(Draw(META, dtype))
            operation.run(*operation.inputs)
            assert operation.floor(1e12, 1e15) > 0
    return {f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}" for launch in found}


@pytest.mark.parametrize("name", TOYS)
def test_each_operation_equals_its_reference(name: str) -> None:
    assert TOYS[name](Draw(CPU)).error(F32) <= 1


def test_checked_and_timed_operations_launch_all_kernels() -> None:
    of_toys = launched(TOYS.values())
    assert launched(CHECKED.values()) == launched(CHECKED.values(), BF16) == of_toys
    # Only these two kernels are not timed, because they occur only as parts of other operations.
    assert of_toys - launched(TIMED.values(), BF16) == {
        "baton.kernels.attention.paged.triton_write._write_pages",
        "baton.kernels.linear.quantized.triton._look_up",
    }


def test_no_compiled_kernel_is_missing() -> None:
    from tests.kernels.gpu.compile_shapes import launches

    of_cases = {f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}" for _, launch in launches()}
    assert of_cases <= launched(TOYS.values()) | launched(CHECKED.values())


def test_wrong_results_are_found() -> None:
    x = torch.randn(40)

    def operation(run: Callable[[Tensor], Sequence[Tensor]]) -> Operation:
        return Operation(run, lambda x: (x + 1,), (x,), 160)

    def unwritten(x: Tensor) -> tuple[Tensor]:
        y = torch.empty(40)
        y[1:] = x[1:] + 1
        return (y,)

    assert operation(lambda x: (x + 1,)).error(F32) <= 1
    assert operation(lambda x: (x + 1.001,)).error(F32) > 1
    assert operation(unwritten).error(F32) == float("inf")
    assert operation(lambda x: (x[1:] + 1,)).error(F32) == float("inf")
    assert operation(lambda x: ((x + 1).bfloat16(),)).error(F32) <= 1
    assert Operation(lambda x: (x.long(),), lambda x: (x.long() + (x > 1),), (x,), 160).error(F32) > 1


def test_a_floor_is_the_larger_of_two_bounds() -> None:
    operation = Operation(tuple, tuple, (), 10, 1000)
    assert operation.floor(bandwidth=10, rate=100) == 10
    assert operation.floor(bandwidth=0.1, rate=100) == 100
