"""The error of --quantize in the parts that recurrences and gates are sensitive to: it must be zero."""

import pytest
import torch
from torch import Tensor, nn

from baton.models.batch import Batch, Model, Prefill, allocate
from baton.models.loading.checkpoint import random_model
from baton.models.loading.filling import PACKED
from scripts.benchmarks.common.trained import imitate_training
from scripts.benchmarks.parts.rounding import FLOATS, parts_of, rounded
from tests.models.oracle import settings_of

CPU = torch.device("cpu")
TOKENS = 48
FAMILIES = [
    "mamba2",
    "nemotron_h-moe-latent",
    "granitemoehybrid-moe",
    "bamba",
    "falcon_h1",
    "qwen3_next-moe",
    "qwen3_5_text",
    "kimi_linear-moe",
]


def predictions(model: Model) -> Tensor:
    """Return the log probabilities of the next token at each position, float64."""
    pools, table = allocate(model, 1, 3, 16, CPU), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    prefill = Prefill([0, TOKENS], [0], [0], [], table)
    hidden = model.forward(Batch(torch.arange(TOKENS) * 5, torch.arange(TOKENS), prefill, None), pools)
    return model.logits(hidden).double().log_softmax(1)


def divergence(exact: Tensor, found: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(1).mean())


@torch.inference_mode()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_decay_and_gates_cause_no_error(name: str, bits: int) -> None:
    """All other weights are multiples of their scales, so quantizing them changes nothing.

    The rounding of decay and gates alone would change the predictions far more than float32 arithmetic does.
    """
    model = random_model(settings_of(name), torch.float32, CPU, 0)
    assert isinstance(model, nn.Module)
    imitate_training(model, 1)
    parts = parts_of(model)
    with rounded([matrix for part, matrices in parts.items() if part not in FLOATS for matrix in matrices], bits):
        exact = predictions(model)
        with rounded([matrix for part in FLOATS for matrix in parts.get(part, [])], bits):
            all_rounded = divergence(exact, predictions(model))
        for module in model.modules():
            if isinstance(module, PACKED):
                module.pack(bits)
    found = divergence(exact, predictions(model))
    assert abs(found) < 1e-6 and all_rounded > 30 * abs(found) and all_rounded > 1e-6
