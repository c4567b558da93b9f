"""Quantized safetensors, written by the tests: the model must equal the model of the dequantized weights exactly."""

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.loading.formats.writing import WAYS, Way, quantize
from tests.models.loading.test_loading import assert_loads_alike, copied, load, run
from tests.models.oracle import Oracle

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next-moe": {"moe_intermediate_size": 32},
    "granitemoehybrid-moe": {"intermediate_size": 64},
    "mamba2-groups": {},
    "kimi_linear-moe": {"moe_intermediate_size": 32},
    "nemotron_h": {},
    "lfm2_moe": {"moe_intermediate_size": 32},
    "falcon_h1": {},
}
"""Families with their sizes, so that the groups of 32 inputs fill the rows of experts too."""
PAIRS = list(zip(islice(cycle(MODELS), 3 * len(WAYS)), islice(cycle(WAYS), 3 * len(WAYS)), strict=True))


def written(oracle: Oracle, folder: Path, name: str, way: Way) -> tuple[Path, Path]:
    """Return a quantized checkpoint, and one with the weights that it stands for."""
    path, plain = (copied(oracle.checkpoint(name, **MODELS[name]), folder / kind) for kind in ("quantized", "plain"))
    save_file(quantize(path, way), plain / "model.safetensors")
    return path, plain


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_a_model_has_its_dequantized_weights(oracle: Oracle, tmp_path: Path, name: str, way: str) -> None:
    assert_loads_alike(*written(oracle, tmp_path, name, WAYS[way]))


@pytest.mark.parametrize("way", ["awq", "nf4, nested"])
def test_weights_get_the_models_dtype(oracle: Oracle, tmp_path: Path, way: str) -> None:
    found, expected = (run(load(path, torch.bfloat16)) for path in written(oracle, tmp_path, "nemotron_h", WAYS[way]))
    assert torch.equal(found, expected)
