"""Batches of long and short segments of latent attention compute the same on the late device as on a CPU."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.kernels.attention.latents import sizes
from baton.models.batch import Batch, Decode, Model, Pools, Prefill, allocate
from baton.models.loading.checkpoint import random_model
from tests.late import LateDevice
from tests.late.log import FAULTS
from tests.models.oracle import VOCABULARY, settings_of

CPU, META = torch.device("cpu"), torch.device("meta")
PAGE, ROWS, PAGES = 16, 5, 8
KERNEL = "_attend_block"


@dataclass(frozen=True)
class Step:
    """A batch: the start and the length of each row's prompt, and the position of each row that decodes."""

    prompts: dict[int, tuple[int, int]]
    decodes: dict[int, int]

    def batch(self, device: torch.device) -> Batch:
        segments = [*self.prompts.values(), *((position, 1) for position in self.decodes.values())]
        offsets = [0, *torch.tensor([length for _, length in self.prompts.values()]).cumsum(0).tolist()]
        positions = torch.cat([torch.arange(start, start + length) for start, length in segments])
        starts, slots = [start for start, _ in self.prompts.values()], [*self.prompts]
        prefill = Prefill(offsets, starts, slots, [], table(slots, device))
        tokens = (positions * 7 + len(segments)) % VOCABULARY
        rows, places = torch.tensor([*self.decodes]), positions[offsets[-1] :]
        decode = Decode(rows.to(device), places.to(device), table([*self.decodes], device)) if self.decodes else None
        return Batch(tokens.to(device), positions.to(device), prefill, decode)


def table(rows: list[int], device: torch.device) -> Tensor:
    return torch.arange(ROWS * PAGES, dtype=torch.int32).view(ROWS, PAGES)[rows].to(device)


# Segments of at least 34 tokens are long. Long ones and short ones take turns; later ones begin in the middle.
STEPS = [
    Step({0: (0, 40), 1: (0, 5), 2: (0, 9), 3: (0, 34), 4: (0, 33)}, {}),
    Step({1: (5, 60), 2: (9, 3), 3: (34, 35)}, {0: 40, 4: 33}),
    Step({0: (41, 50), 2: (12, 50)}, {1: 65}),
    Step({3: (69, 2), 4: (34, 1)}, {0: 91, 1: 66, 2: 62}),
]


def made(name: str, device: torch.device) -> tuple[Model, Pools]:
    model = random_model(settings_of(name), torch.float32, device, 0)
    return model, allocate(model, ROWS, ROWS * PAGES, PAGE, device)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("kimi_linear-odd", sizes.Forms(34, 20)),
        pytest.param("kimi_linear", None, marks=pytest.mark.soak),
        pytest.param("kimi_linear-odd", sizes.Forms(1, 1), marks=pytest.mark.soak),
        pytest.param("kimi_linear", sizes.Forms(34, 20), marks=pytest.mark.soak),
        pytest.param("kimi_linear", sizes.Forms(1, 1), marks=pytest.mark.soak),
        pytest.param("kimi_linear-odd", None, marks=pytest.mark.soak),
    ],
)
def test_long_and_short_segments_compute_the_same(
    name: str, forms: sizes.Forms | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are expanded in blocks of 32. The other limits divide spans of short segments, or leave none."""
    monkeypatch.setattr(sizes, "POSITIONS", 32)
    if forms:
        monkeypatch.setattr("baton.models.layers.mla.forms_of", lambda *_: forms)
    with torch.inference_mode():
        model, pools = made(name, CPU)
        expected = [model.logits(model.forward(step.batch(CPU), pools)) for step in STEPS]
    with LateDevice(seed=1, raises=False) as late:
        with late.setup():
            model, late_pools = made(name, META)
            batches = [step.batch(META) for step in STEPS]
        with late.stream().active(), torch.inference_mode():
            found = [model.logits(model.forward(batch, late_pools)) for batch in batches]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(late.read(one), other, rtol=1e-4, atol=1e-4)
        assert any(entry.what == KERNEL and "mla.py" in entry.where for entry in late.log)
        assert not [entry for entry in late.log if entry.kind in FAULTS and re.search("spans|latents|mla", entry.where)]


def test_a_cpu_computes_everything_in_the_absorbed_form() -> None:
    model, pools = made("kimi_linear", CPU)
    plan = model.plan(STEPS[0].batch(CPU), pools)  # type: ignore[attr-defined]
    assert plan.parts == ()
