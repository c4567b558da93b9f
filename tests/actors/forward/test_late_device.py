"""The torch device on an emulated accelerator (tests/late): a step never waits, uploads at most twice, and is right.

Masks that come late take another upload.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk
from baton.actors.forward.launching import Pending
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import KINDS, warm_up
from baton.actors.requests import Request, Stops
from baton.actors.tokens import pack
from baton.kernels.runtime import triton
from baton.kernels.sampling import reference
from baton.models.batch import allocate
from baton.models.layers.attention import Attention
from baton.models.layers.mamba2 import Mamba2Mixer
from baton.models.layers.mlp import GatedMLP, SquaredReluMLP
from tests.actors.forward.story import PAGE, ROWS, Story, model_of, on_the_cpu, pools_of, same
from tests.late import LateDevice
from tests.late.streams import LateStream

LAYERS = (Mamba2Mixer, Attention, GatedMLP, SquaredReluMLP)


@pytest.fixture
def drawn_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw tokens with the reference kernel, which is fifty times as fast as Triton's interpreter."""
    for module in ("step.captured", "torch_device"):
        monkeypatch.setattr(f"baton.actors.forward.{module}.sample", reference.sample)


def late_device(late: LateDevice, family: str, rows: int = ROWS) -> TorchDevice:
    stream, model = late.stream(), model_of(family)
    late.to(model)
    with late.setup():
        pools = pools_of(model, torch.device("meta"))
    device = TorchDevice(model, pools, rows, 90, stream=stream)
    device.capture()
    return device


@pytest.mark.usefixtures("drawn_by_torch")
@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("mamba2-groups", None),
        ("nemotron_h", 0),
        pytest.param("granitemoehybrid-rope", None, marks=pytest.mark.soak),
        pytest.param("granitemoehybrid-moe", 1, marks=pytest.mark.soak),
    ],
)
def test_steps_are_right_however_late_the_device_is(family: str, seed: int | None) -> None:
    check(family, seed)


def test_steps_are_right_with_tokens_drawn_by_triton() -> None:
    check("mamba2", 1)


def check(family: str, seed: int | None) -> None:
    expected, pools = on_the_cpu(family)
    with LateDevice(seed) as late:
        device = late_device(late, family)
        found = Story(device).tell()
        same(found, expected)
        for slot in (7, 8, 9, 10):
            for tensor, exact in zip(device.pools.state, pools.state, strict=True):
                torch.testing.assert_close(late.read(tensor)[slot], exact[slot], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("drawn_by_torch")
def test_a_step_uploads_twice_at_most_and_its_thread_waits_for_nothing() -> None:
    with LateDevice() as late:
        device = late_device(late, "nemotron_h")
        story, prepare, launch = Story(device), device.prepare, device.launch

        def noted(work: Work) -> None:
            marks[work.step] = len(late.log)
            prepare(work)

        def counted(work: Work) -> Pending:
            mark = marks.get(work.step, len(late.log))
            pending = launch(work)
            assert late.count("upload", mark) <= 2 + (work.late is not None) and late.count("wait", mark) == 0
            if not work.chunks:
                uploads.append(late.count("upload", mark))
                launches.append(late.count("launch", mark))
            return pending

        uploads, launches, marks = list[int](), list[int](), dict[int, int]()
        device.prepare, device.launch = noted, counted  # type: ignore[method-assign]
        story.tell()
        assert uploads[0] == 2, "a page is appended"
        assert uploads[1] == 1 and launches[1] == 0, "all of it is captured"


@pytest.mark.usefixtures("drawn_by_torch")
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "granitemoehybrid-rope"])
def test_a_decoding_step_takes_few_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes under eight launches for each mixer or feed-forward layer with its norm, and eight for the rest."""
    counts = list[int]()
    with LateDevice() as late:
        capture = LateStream.capture

        def counted(stream: LateStream, run: Callable[[], None]) -> Callable[[], None]:
            mark = len(late.log)
            replay = capture(stream, run)
            counts.append(late.count("launch", mark))
            return replay

        monkeypatch.setattr(LateStream, "capture", counted)
        device = late_device(late, family)
        late.synchronize()
        del device
    layers = sum(isinstance(part, LAYERS) for part in model_of(family).modules())
    assert 3 * layers < counts[0] - 8 < 8 * layers, (counts[0], layers)


def variant(launch: triton.Launch) -> tuple[Any, ...]:
    """Return everything that Triton specialises a kernel for: constants, types, and alignment of pointers."""
    arguments = tuple(
        (argument.dtype, argument.storage_offset() * argument.itemsize % 16 == 0)
        if isinstance(argument, torch.Tensor)
        else type(argument)
        for argument in launch.arguments
    )
    constants = (*sorted(launch.constants.items()), *sorted(launch.config.blocks.items()))
    return launch.kernel.fn.__name__, arguments, constants, launch.config.warps, launch.config.stages


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("mamba2", ROWS),
        pytest.param("mamba2", 1, marks=pytest.mark.soak),
        pytest.param("mamba2", 2, marks=pytest.mark.soak),
        pytest.param("granitemoehybrid-rope", ROWS, marks=pytest.mark.soak),
        pytest.param("granitemoehybrid-rope", 1, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(family: str, rows: int) -> None:
    seen = set[tuple[Any, ...]]()
    late = LateDevice()
    launch = late.operations.launch

    def noted(kernel: triton.Launch) -> None:
        seen.add(variant(kernel))
        launch(kernel)

    late.operations.launch = noted  # type: ignore[method-assign]
    with late:
        device = late_device(late, family, rows)
        warm_up(device, 70)
        warmed = set(seen)
        if rows == ROWS:
            Story(device).tell()
        one_after_another(device)
    assert len(warmed) > 5 and seen - warmed == set()


def one_after_another(device: TorchDevice) -> None:
    """Run a request of each kind of sampling in row 0: a prompt with log probabilities, and a decoding step. Then copy
    its state to host memory and back.
    """
    pages = [3, 1, 4] if device.pools.pages else []
    for sampling, more in KINDS:
        device.clear(0)
        more = {**more, "logprobs": 2, "prompt_logprobs_from": 0}
        device.open_row(0, 0, 0, Request("r", pack([1] * 7), 7, sampling, Stops(9), **more), pages)
        device.launch(Work(0, [WorkChunk(0, 0, 7, True)], [], [], [WorkCheckpoint(0, 5, 8)])).collect()
        device.launch(Work(1, [], [0], [7], [WorkCheckpoint(0, 8, 9)])).collect()
    device.export(5, 0, pages, 8).collect()
    device.fill(0, 5, 1, pages, 0).collect()
    device.drop(5)


@pytest.mark.parametrize(("slots", "pages", "rows"), [(2, 3, 1), (2, 3, 4), (3, 5, 2), (6, 8, 4), (6, 1, 4)])
def test_a_warm_up_keeps_to_the_pools(slots: int, pages: int, rows: int) -> None:
    """The warm-up may not write to the last slot and page: they are reserved for padding."""
    model = model_of("nemotron_h")
    pools = allocate(model, slots, pages, PAGE, torch.device("cpu"))
    warm_up(TorchDevice(model, pools, rows, 90), 70)
    assert bool(pools.slots[0].any()) is (pages > 1)
    assert not pools.slots[-1].any() and not pools.blocks[-1].any()


@pytest.mark.usefixtures("drawn_by_torch")
def test_the_inbox_grows_with_its_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first upload is larger than the inbox that the captured steps were recorded with."""
    monkeypatch.setattr("baton.actors.forward.torch_device.INBOX_BYTES", 64)
    check("nemotron_h", None)
