"""The best known models of each family, without weights: configs parse, models build, every tensor is accounted for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.actors.runtime.sizing import count_parameters
from baton.models.config import ModelError, read_config
from baton.models.family import Family
from baton.models.loading.checkpoint import find_family
from baton.models.loading.formats.composed import Composed
from baton.models.loading.matching import match
from baton.models.loading.quantization import compose, read_quantization
from baton.models.loading.shards import StoredTensor
from tests.models.configurations import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    lfm3,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen,
)
from tests.models.configurations.published import Published, Shapes

FAMILIES = (
    mamba2,
    granitemoehybrid,
    nemotron_h,
    bamba,
    falcon_h1,
    qwen,
    kimi_linear,
    lfm2,
    lfm3,
    olmo_hybrid,
    bailing_hybrid,
)
PUBLISHED = {name: published for family in FAMILIES for name, published in family.PUBLISHED.items()}
EVERY = pytest.mark.parametrize("name", PUBLISHED)


def stored(tensors: Shapes) -> list[StoredTensor]:
    return [StoredTensor(Path("model.safetensors"), name, shape, "BF16") for name, shape in tensors.items()]


def build(published: Published, folder: Path) -> tuple[nn.Module, Family]:
    (folder / "config.json").write_text(json.dumps(published.config))
    config = read_config(folder)
    family = find_family(config)
    with torch.device("meta"):
        model = family.build(config, torch.bfloat16, torch.float32)
    assert isinstance(model, nn.Module)
    return model, family


@EVERY
def test_size_of_model_and_states_is_as_published(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    model, _ = build(published, tmp_path)
    assert published.is_size(count_parameters(model)), count_parameters(model)
    assert sum(spec.nbytes for spec in model.state_specs()) == published.state
    assert sum(spec.nbytes for spec in model.kv_specs()) == published.kv


@EVERY
def test_every_tensor_of_the_files_is_accounted_for(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    model, family = build(published, tmp_path)
    parameters, config = dict(model.named_parameters()), read_config(tmp_path)
    there = published.tensors | published.left_out
    fillings, repeated = match(stored(there), parameters, family, config)
    assert repeated is None
    assert {tensor.name for tensor, _ in fillings} == published.tensors.keys()
    every = len(published.tensors) // (5 if len(published.tensors) < 10_000 else 1)
    for lost in list(published.tensors)[::every]:
        with pytest.raises(ModelError, match=r"missing tensors|parameters not filled once"):
            match(stored({name: there[name] for name in there.keys() - {lost}}), parameters, family, config)


BLOCK = 128
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def in_fp8(tensors: Shapes, by_block: bool) -> list[StoredTensor]:
    """Return the tensors with FP8 projections, and their scales: by block as in Qwen's files, else as in modelopt's."""
    found = stored(tensors)
    for index, tensor in enumerate(found):
        *stack, rows, columns = (1, 1, *tensor.shape)[-max(len(tensor.shape), 2) :]
        if "_proj" not in tensor.name or min(rows, columns) < BLOCK:
            continue
        found[index] = replace(tensor, dtype="F8_E4M3")
        if by_block:
            shape = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
            found.append(StoredTensor(tensor.file, f"{tensor.name}_scale_inv", shape, "BF16"))
        else:
            path = tensor.name.removesuffix("weight")
            scales = ["weight_scale", "input_scale", *(["k_scale"] if "k_proj" in path else [])]
            found += [StoredTensor(tensor.file, f"{path}{scale}", (), "F32") for scale in scales]
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "version": "gemm"}
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}},
}  # fmt: skip


def in_four_bits(tensors: Shapes, is_awq: bool) -> list[StoredTensor]:
    """Return the tensors with projections in 4 bits, as AutoAWQ or modelopt store them."""
    found = []
    for tensor in stored(tensors):
        outputs, inputs = tensor.shape if len(tensor.shape) == 2 else (1, 1)
        path = tensor.name.removesuffix("weight")
        if not path.endswith("_proj.") or outputs % 8 or inputs % BLOCK:
            found.append(tensor)
        elif is_awq:
            parts = {"qweight": ((inputs, outputs // 8), "I32"), "qzeros": ((inputs // BLOCK, outputs // 8), "I32"),
                     "scales": ((inputs // BLOCK, outputs), "F16")}  # fmt: skip
            found += [StoredTensor(tensor.file, path + end, *each) for end, each in parts.items()]
        else:
            found.append(StoredTensor(tensor.file, tensor.name, (outputs, inputs // 2), "U8"))
            scales = {"weight_scale": ((outputs, inputs // 16), "F8_E4M3"), "weight_scale_2": ((), "F32")}
            found += [StoredTensor(tensor.file, path + end, *each) for end, each in scales.items()]
    return found


@pytest.mark.parametrize(
    ("name", "way"), [("NVIDIA-Nemotron-3-Nano-30B-A3B", NVFP4), ("Qwen3.5-9B", AWQ), ("Qwen3.5-9B", NVFP4)]
)
def test_every_tensor_of_files_in_four_bits_is_accounted_for(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    published = replace(PUBLISHED[name], config={**PUBLISHED[name].config, "quantization_config": way})
    model, family = build(published, tmp_path)
    config, there = read_config(tmp_path), in_four_bits(published.tensors, way is AWQ)
    weights = compose(there, read_quantization(tmp_path, config))
    assert sum(isinstance(tensor, Composed) for tensor in weights) > len(published.tensors) / 4
    fillings, _ = match(weights, dict(model.named_parameters()), family, config)
    assert {tensor.name for tensor, _ in fillings} == published.tensors.keys()


@pytest.mark.parametrize(
    ("name", "way"),
    [("NVIDIA-Nemotron-3-Nano-30B-A3B", MODELOPT), ("Qwen3.5-35B-A3B", BLOCKS), ("Qwen3.5-9B", BLOCKS)],
)
def test_every_tensor_of_fp8_files_is_accounted_for(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    published = replace(PUBLISHED[name], config={**PUBLISHED[name].config, "quantization_config": way})
    model, family = build(published, tmp_path)
    config = read_config(tmp_path)
    there = in_fp8(published.tensors, way is BLOCKS)
    assert sum(tensor.dtype == "F8_E4M3" for tensor in there) > len(published.tensors) / 3
    weights = compose(there, read_quantization(tmp_path, config))
    fillings, _ = match(weights, dict(model.named_parameters()), family, config)
    assert {tensor.name for tensor, _ in fillings} == published.tensors.keys()
