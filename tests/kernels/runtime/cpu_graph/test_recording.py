"""Recorded computations."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.activations import silu_multiply, squared_relu
from baton.kernels.linear.dense import linear, pack
from baton.kernels.norm.rms import add_rms_norm
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpu_graph import NotRecordable, SharedMemory, record
from baton.kernels.runtime.cpu_graph.recording import NAME

pytestmark = pytest.mark.usefixtures("native_kernels")


def layers(x: Tensor, count: int) -> Callable[[], Tensor]:
    """Return a computation over x, [rows, 64], with `count` layers."""
    g = torch.Generator().manual_seed(0)
    norm = torch.ones(64)
    up = [pack(torch.randn(192, 64, generator=g)) for _ in range(count)]
    down = [pack(torch.randn(64, 96, generator=g)) for _ in range(count)]

    def compute() -> Tensor:
        residual, added = x, None
        for wide, narrow in zip(up, down, strict=True):
            assert wide is not None and narrow is not None
            residual, normed = add_rms_norm(residual, added, norm, 1e-5)
            added = linear(silu_multiply(linear(normed, wide, None)), narrow, None)
        return add_rms_norm(residual, added, norm, 1e-5, 0.3)[1]

    return compute


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_replay_is_the_computation(rows: int) -> None:
    x = torch.zeros(rows, 64)
    compute = layers(x, 4)
    recording = record(compute, SharedMemory())
    for seed in range(3):
        x.copy_(torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(recording.replay(), compute())


def test_recordings_that_share_memory_run_in_turns() -> None:
    memory = SharedMemory()
    computations = [layers(torch.full((rows, 64), float(rows)), 2) for rows in (1, 30, 3)]
    recordings = [record(compute, memory) for compute in computations]
    for index in (0, 2, 1, 1, 0):
        assert torch.equal(recordings[index].replay(), computations[index]())


def test_recording_computes_nothing() -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    before = torch.full((3, 8), 7.0)
    run = cpp.function("baton_add_rms_norm")
    assert run is not None

    def compute() -> Tensor:
        watched = cpp.function("baton_add_rms_norm")
        assert watched is not None
        watched(3, 8, x.data_ptr(), 0, None, 0, weight.data_ptr(), 0, 1e-5, 1.0, 0.0, None, before.data_ptr())
        return before

    recording = record(compute, SharedMemory())
    assert torch.equal(before, torch.full((3, 8), 7.0))
    assert recording.replay() is before
    assert torch.allclose(before, torch.ones(3, 8))


def test_the_output_may_be_a_view_of_a_buffer() -> None:
    x = torch.randn(4, 8)
    recording = record(lambda: squared_relu(x)[1:3, 2:], SharedMemory())
    assert torch.equal(recording.replay(), squared_relu(x)[1:3, 2:])


@pytest.mark.parametrize(
    "more",
    [lambda x: x + 1, lambda x: x.mul_(2), lambda x: torch.zeros(3, 8), lambda x: x.clone(), lambda x: x[x.argmax()]],
    ids=["an operation", "in place", "a constant", "a copy", "a look at values"],
)
def test_operations_that_a_replay_would_not_repeat_are_refused(more: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(NotRecordable, match="is not native code"):
        record(lambda: squared_relu(more(squared_relu(x))), SharedMemory())
    assert torch.equal(squared_relu(x), squared_relu(x.clone()))


def test_every_function_can_be_recorded() -> None:
    for name in cpp.declared():
        assert name == NAME or cpp.address_of_words(name)


def test_without_native_code_nothing_is_recordable() -> None:
    cpp.uninstall()
    with pytest.raises(NotRecordable, match="no native code"):
        record(lambda: torch.empty(1), SharedMemory())


def test_recording_does_not_import_dynamo() -> None:
    script = (
        "import sys, baton.models.recorded\n"
        "from baton.kernels.runtime.cpp.prepare import prepare\n"
        "prepared = prepare({'linear.dense', 'runtime.cpu_graph', 'norm.rms'})\n"
        "prepared.install(1)\n"
        "assert not prepared.left_out and not prepared.problem, prepared\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
