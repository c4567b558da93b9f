"""Quantized safetensors whose integers stay integers: the logits of the dequantized weights, in less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.kernels.linear.quantized import Form
from baton.models.loading.checkpoint import load_model
from baton.models.loading.formats.composed import MixedGroups
from baton.models.loading.formats.grouped import GroupedIntegers, form_of_integers
from baton.models.loading.quantization import compose, read_quantization
from baton.models.loading.shards import MappedShards, find_shards, read_headers
from baton.models.loading.source import read_source_config
from tests.kernels.installed import installed
from tests.models.gguf.test_kept import assert_kept, kept_and_dequantized
from tests.models.loading.formats.test_formats import MODELS, written
from tests.models.loading.formats.writing import WAYS, Way, awq, gptq, packed
from tests.models.oracle import Oracle

CPU = torch.device("cpu")
KEPT: dict[str, Way] = {
    **{name: WAYS[name] for name in ("awq", "awq in one group", "gptq", "gptq_v2, asymmetric", "packed")},
    **{name: WAYS[name] for name in ("packed, asymmetric", "packed by channel", "packed, 8 bits", "int8")},
    "groups of 64": packed(4, 64, symmetric=False),
    "gptq, 8 bits, symmetric": gptq(8, 32, symmetric=True),
}


@pytest.mark.parametrize(("name", "way"), [(list(MODELS)[at % len(MODELS)], way) for at, way in enumerate(KEPT)])
def test_integers_stay_integers(oracle: Oracle, tmp_path: Path, name: str, way: str) -> None:
    model = assert_kept(written(oracle, tmp_path, name, KEPT[way])[0])
    if "moe" in name:
        assert {each.dtype for key, each in model.named_parameters() if "input_linear" in key} >= {torch.uint8}


def test_weights_that_a_family_multiplies_are_dequantized_and_counted_so(oracle: Oracle, tmp_path: Path) -> None:
    """Falcon-H1 multiplies most of its projections by its multipliers."""
    model = assert_kept(written(oracle, tmp_path, "falcon_h1", KEPT["awq"])[0])
    dtypes = {key: each.dtype for key, each in model.named_parameters() if key.endswith("proj.weight")}
    assert torch.uint8 in dtypes.values() and torch.float32 in dtypes.values()


@pytest.mark.parametrize("way", ["gptq, ordered", "gptq, 8 bits", "int8, asymmetric", "nvfp4 of modelopt", "nf4"])
def test_others_are_dequantized(oracle: Oracle, tmp_path: Path, way: str) -> None:
    path, plain = written(oracle, tmp_path, "nemotron_h", WAYS[way])
    model, found, _ = kept_and_dequantized(path)
    assert not any(each.dtype == torch.uint8 for each in model.parameters())
    with installed():
        expected = kept_and_dequantized(plain)[1]
    assert torch.equal(found, expected)


def integers(path: Path) -> list[GroupedIntegers]:
    stored = read_headers(find_shards(path))
    weights = compose(stored, read_quantization(path, read_source_config(path)))
    return [weight for weight in weights if isinstance(weight, GroupedIntegers)]


@pytest.mark.parametrize("way", KEPT)
def test_integers_in_memory_are_those_of_the_file(oracle: Oracle, tmp_path: Path, way: str) -> None:
    shards = MappedShards()
    for weight in integers(written(oracle, tmp_path, "granitemoehybrid-moe", KEPT[way])[0]):
        if weight.form is not None:
            numbers = weight.groups(shards.view).numbers()
            assert torch.equal(numbers, weight.values(shards.view, torch.float32)), weight.name


def test_zeros_that_the_settings_do_not_promise_are_dequantized(oracle: Oracle, tmp_path: Path) -> None:
    def claim(way: Way) -> Way:
        return Way({**way.config, "sym": True}, way.write)

    path, _ = written(oracle, tmp_path, "nemotron_h", claim(WAYS["gptq, asymmetric"]))
    with pytest.raises(MixedGroups):
        for weight in integers(path):
            weight.groups(MappedShards().view)
    model, found, plain = kept_and_dequantized(path)
    assert (found - plain).abs().max() < 1e-3 * plain.abs().max()
    assert any(each.dtype != torch.uint8 for key, each in model.named_parameters() if "proj" in key)


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ((4, 256, 128, False, "F16"), Form(4, 64, dtype=torch.float16)),
        ((4, 96, 32, False, "BF16"), Form(4, 32)),
        ((8, 64, 64, False, "BF16"), Form(8, 64)),
        ((4, 256, 128, True, "F16"), Form(4, 64, span=2, has_minima=True, dtype=torch.float16)),
        ((4, 96, 96, True, "F16"), Form(4, 16, span=2, has_minima=True, dtype=torch.float16)),
        ((8, 256, 128, True, "F16"), None),
        ((4, 256, 128, True, "F32"), None),
        ((4, 200, 128, False, "F16"), None),
        ((4, 48, 16, False, "F16"), None),
    ],
)
def test_the_form_of_integers(arguments: Any, form: Form | None) -> None:
    assert form_of_integers(*arguments) == form


def test_quantizing_again_takes_the_dequantized_weights(oracle: Oracle, tmp_path: Path) -> None:
    path, plain = written(oracle, tmp_path, "lfm2_moe", awq(32))
    found, expected = (load_model(folder, None, CPU, bits=8) for folder in (path, plain))
    assert isinstance(found, nn.Module) and isinstance(expected, nn.Module)
    weights = dict(expected.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in found.named_parameters())
