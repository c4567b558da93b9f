"""The torch device on a GPU gives the same results as on a CPU, and compiles nothing after its warm-up."""

from typing import Any

import pytest
import torch

from baton.actors.forward.cuda_stream import CudaStream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import warm_up
from baton.models.batch import Pools
from tests.actors.forward.story import ROWS, Story, model_of, on_the_cpu, pools_of, same
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


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "granitemoehybrid-rope"])
def test_nothing_is_compiled_after_the_warm_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    device, _ = on_the_gpu(family)
    warm_up(device, 70)
    compiled = list[str]()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    Story(device).tell()
    assert compiled == []
