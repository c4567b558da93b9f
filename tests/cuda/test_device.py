"""The torch device on a GPU gives the same results as on a CPU, and compiles nothing after its warm-up."""

from typing import Any

import pytest
import torch

from baton.actors.forward.cuda_stream import CudaStream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import warm_up
from baton.actors.storage.host_memory import HostStates
from baton.api.machine import host_arena
from baton.api.machine.gpu import broken_triton
from baton.api.machine.host_arena import ArenaStart
from baton.models.batch import Pools
from tests.actors.forward import test_late_drafts
from tests.actors.forward.story import PAGE, ROWS, Story, model_of, on_the_cpu, pools_of, same
from tests.models.oracle import CHECKPOINTS

CUDA = torch.device("cuda", 0)


def on_the_gpu(family: str) -> tuple[TorchDevice, Pools]:
    model: Any = model_of(family)
    model.to(CUDA)
    pools = pools_of(model, CUDA)
    torch.cuda.synchronize()
    device = TorchDevice(model, pools, ROWS, 90, stream=CudaStream(CUDA))
    device.capture()
    return device, pools


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_steps_are_right(family: str) -> None:
    expected, exact = on_the_cpu(family)
    device, pools = on_the_gpu(family)
    same(Story(device).tell(), expected)
    torch.cuda.synchronize()
    for slot in (7, 8, 9, 10):
        for tensor, other in zip(pools.state, exact.state, strict=True):
            torch.testing.assert_close(tensor[slot].cpu(), other[slot], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_captured_steps_verify_drafts(family: str) -> None:
    plain = TorchDevice(model_of(family), test_late_drafts.pools_of(family, torch.device("cpu")), ROWS, 90)
    expected = test_late_drafts.Decoding(plain, None).run()
    model: Any = model_of(family)
    model.to(CUDA)
    pools = test_late_drafts.pools_of(family, CUDA)
    torch.cuda.synchronize()
    device = TorchDevice(model, pools, ROWS, 90, stream=CudaStream(CUDA))
    device.capture()
    for seed in range(3):
        assert test_late_drafts.Decoding(device, expected, seed).run() == expected
    torch.cuda.synchronize()
    for row in range(ROWS):
        for tensor, other in zip(pools.state, plain.pools.state, strict=True):
            torch.testing.assert_close(tensor[row].cpu(), other[row], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "granitemoehybrid-rope"])
def test_nothing_is_compiled_after_the_warm_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    device, _ = on_the_gpu(family)
    warm_up(device, 70)
    compiled = list[str]()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    Story(device).tell()
    assert compiled == []


def test_copies_in_locked_lines_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "CHUNK", 2**20)
    model: Any = model_of("nemotron_h")
    start = ArenaStart(2**23, PAGE, CUDA)
    start.begin(model)
    arena = start.finish()
    [line] = arena.take(1) or []
    assert line.is_pinned() and arena.nbytes > 2**22
    del line
    pools = pools_of(model.to(CUDA), CUDA)
    device = TorchDevice(model, pools, ROWS, 90, HostStates(arena), CudaStream(CUDA))
    for each in (pools.slots, pools.blocks):
        each.random_(0, 256)
    torch.cuda.synchronize()
    state, blocks = pools.slots[2].clone(), pools.blocks[[5, 3, 7]].clone()
    device.export(1, 2, [5, 3, 7], 3 * PAGE).collect()
    assert arena.free_lines < arena.nbytes // arena.lines.nbytes
    pools.slots[2].zero_()
    pools.blocks[[5, 3, 7]] = 0
    torch.cuda.synchronize()
    device.fill(9, 1, 4, [6, 2], 1).collect()
    assert torch.equal(pools.slots[4], state) and torch.equal(pools.blocks[[6, 2]], blocks[1:])
    device.drop(1)
    assert arena.free_lines == arena.nbytes // arena.lines.nbytes


def test_triton_launches_a_kernel_on_the_gpu() -> None:
    assert broken_triton(CUDA) == ""
