"""Every family computes the same on the late device as on a CPU, in captured steps too."""

import pytest
import torch
from torch import Tensor

from baton.models.batch import Batch, Decode, Model, Pools, Prefill, StateCheckpoint, allocate
from baton.models.loading.checkpoint import random_model
from tests.late import LateDevice
from tests.models.oracle import CHECKPOINTS, VOCABULARY, settings_of

CPU, META = torch.device("cpu"), torch.device("meta")
PAGE, SLOTS, PAGES = 4, 5, 12
LENGTHS, TOKENS = [9, 3, 20], [5, 6, 7]
QUICK = ("mamba2-groups", "nemotron_h-moe", "granitemoehybrid-rope", "falcon_h1", "qwen3_5_moe", "kimi_linear", "lfm2")
"""These families together contain every layer that Triton computes. Its interpreter is slow: the soak runs the rest."""


def made(name: str, device: torch.device) -> tuple[Model, Pools]:
    model = random_model(settings_of(name), torch.float32, device, 0)
    return model, allocate(model, SLOTS, SLOTS * PAGES, PAGE, device)


def table(rows: list[int], device: torch.device) -> Tensor:
    return torch.arange(SLOTS * PAGES, dtype=torch.int32).view(SLOTS, PAGES)[rows].to(device)


def prefill(device: torch.device) -> Batch:
    offsets, starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()], [0] * len(LENGTHS)
    checkpoints = [StateCheckpoint(2, 7, 3)]
    tokens = (torch.arange(offsets[-1]) % VOCABULARY).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    return Batch(tokens, positions, Prefill(offsets, starts, [0, 1, 2], checkpoints, table([0, 1, 2], device)), None)


def decode(device: torch.device, tokens: list[int], at: int) -> Batch:
    """Return a batch that decodes one token for each of three rows, all at position `at`."""
    positions = torch.full((3,), at).to(device)
    rows = Decode(torch.tensor([0, 1, 2]).to(device), positions, table([0, 1, 2], device))
    return Batch(torch.tensor(tokens).to(device), positions, None, rows)


@torch.inference_mode()
def on_a_cpu(name: str) -> tuple[Tensor, Tensor, Pools]:
    """Return the logits of a prefill, the logits of the decoding step after it, and the pools after both."""
    model, pools = made(name, CPU)
    return (
        model.logits(model.forward(prefill(CPU), pools)),
        model.logits(model.forward(decode(CPU, TOKENS, 20), pools)),
        pools,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak) for name in CHECKPOINTS]
)
def test_families_compute_the_same(name: str) -> None:
    first, second, pools = on_a_cpu(name)
    with LateDevice(seed=1, raises=False) as late:
        with late.setup():
            model, late_pools = made(name, META)
            batches = prefill(META), decode(META, TOKENS, 20)
        with late.stream().active(), torch.inference_mode():
            found = [model.logits(model.forward(batch, late_pools)) for batch in batches]
        torch.testing.assert_close(late.read(found[0]), first, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(late.read(found[1]), second, rtol=1e-4, atol=1e-4)
        for state, expected in zip([*late_pools.state, *late_pools.pages], [*pools.state, *pools.pages], strict=True):
            torch.testing.assert_close(late.read(state), expected, rtol=1e-4, atol=1e-4)
        assert any(entry.what == "_add_rms_norm" for entry in late.log), "Triton's kernels are among what ran"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", ["mamba2", "mamba2-groups"])
def test_decoding_steps_are_captured_and_replayed(name: str, seed: int | None) -> None:
    """Run two steps, and upload the tokens of each into the input tensors of the captured step."""
    steps = [[5, 6, 7], [8, 9, 10]]
    model, pools = made(name, CPU)
    with torch.inference_mode():
        expected = []
        for at, tokens in enumerate(steps):
            expected.append(model.logits(model.forward(decode(CPU, tokens, at), pools)))
    with LateDevice(seed) as late:
        stream = late.stream()
        with late.setup():
            model, pools = made(name, META)
            batch, logits = decode(META, TOKENS, 0), torch.zeros(3, VOCABULARY, device=META)
            model.logits(model.forward(batch, pools))
            pools.slots.zero_()
        assert batch.decode is not None

        def step() -> None:
            logits.copy_(model.logits(model.forward(batch, pools)))

        with torch.inference_mode():
            before = len(late.log)
            replay = stream.capture(step)
            assert late.count("launch", before) > 0
            assert late.read(pools.slots).count_nonzero() == 0, "a capture executes nothing"
            before, events, results = len(late.log), [], []
            for at, tokens in enumerate(steps):
                host = stream.host_buffer(48).view(torch.int64)
                host[:3], host[3:] = torch.tensor(tokens), at
                stream.upload(host[:3], batch.tokens)
                stream.upload(host[3:], batch.decode.positions)
                replay()
                results.append(stream.host_buffer(logits.nbytes).view(torch.float32).view(3, VOCABULARY))
                stream.download(logits, results[-1])
                events.append(stream.record())
        assert [late.count(kind, before) for kind in ("launch", "replay", "upload", "download")] == [0, 2, 4, 2]
        for event, result, logits in zip(events, results, expected, strict=True):
            event.wait()
            torch.testing.assert_close(result, logits, rtol=1e-4, atol=1e-4)
