"""A ring over the late device, which enqueues and reads in different threads, gives the same tokens as on a CPU."""

import asyncio
from typing import Any

import pytest
import torch

from baton.actors.forward.torch_device import TorchDevice
from baton.kernels.sampling import reference
from baton.models.batch import allocate
from baton.models.loading.checkpoint import random_model
from tests.actors.ring import running
from tests.actors.test_contained import FailsAt
from tests.late import LateDevice
from tests.models.oracle import CHECKPOINTS

SIZES = {"slots": 7, "pages": 40, "page_size": 4, "max_running": 3, "step_tokens": 24, "track_interval": 8}
PROMPTS = [[(7 * i * i + n) % 97 for i in range(length)] for n, length in enumerate((30, 3, 17, 30, 9))]


def model_of(family: str) -> Any:
    config = {"model_type": family, "vocab_size": 97, **CHECKPOINTS[family][1]}
    return random_model(config, torch.float32, torch.device("cpu"), seed=0)


async def answers(family: str, device: Any = None) -> list[list[int]]:
    """Return the tokens of five concurrent prompts, two of them equal, and of a prompt that continues an answer."""
    wrap = (lambda made: device) if device else (lambda made: made)
    async with running(model_of(family), **SIZES, wrap=wrap) as ring:
        first = [ring.submit(prompt, 6) for prompt in PROMPTS]
        for answer in first:
            await asyncio.wait_for(answer.done.wait(), 300)
        last = await ring.ask(PROMPTS[0] + first[0].tokens + [5], 4)
        return [answer.tokens for answer in [*first, last]]


@pytest.mark.parametrize(
    ("family", "seed", "fails"),
    [
        ("mamba2", None, None),
        ("mamba2", None, 3),
        pytest.param("nemotron_h", 3, None, marks=pytest.mark.soak),
        pytest.param("nemotron_h", 3, 2, marks=pytest.mark.soak),
    ],
)
def test_the_same_tokens(family: str, seed: int | None, fails: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """fails: which row cannot be set up. The steps, some of them captured, run without it."""
    for module in ("step.captured", "torch_device"):
        monkeypatch.setattr(f"baton.actors.forward.{module}.sample", reference.sample)
    expected = asyncio.run(answers(family))
    with LateDevice(seed) as late:
        model = model_of(family)
        late.to(model)
        with late.setup():
            pages = SIZES["pages"] + 1 if model.kv_specs() else 0
            pools = allocate(model, SIZES["slots"] + 1, pages, SIZES["page_size"], torch.device("meta"))
        device = TorchDevice(model, pools, SIZES["max_running"], 1024, stream=late.stream())
        device.capture()
        late.synchronize()
        before = len(late.log)
        used = device if fails is None else FailsAt(device, "open_row", fails)
        assert asyncio.run(answers(family, used)) == expected
        assert used is device or used.calls == len(PROMPTS) + 2, "the row was set up once more"
        assert "device" in late.entered and late.entered <= {"device", "device-steps", "device-copies"}
        waits = {entry.what for entry in late.log[before:] if entry.kind == "wait"}
        assert waits <= late.entered
        assert seed is not None or waits == {"device-steps"}, "where no step is over early, nobody else waits"
