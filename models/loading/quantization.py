"""FP8 checkpoints: e4m3 weights with scales, which are dequantized to the model's dtype when they are read."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelConfig, ModelError
from baton.models.loading.shards import StoredTensor, listed

SCALES = ("_scale_inv", "_scale")
"""Suffixes of a weight's name in the name of its scale. Despite "_inv", weights are multiplied by either scale."""
OF_ACTIVATIONS = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale")
SCALE_DTYPES = ("F64", "F32", "F16", "BF16")
FP8, ROWS_AT_ONCE = "F8_E4M3", 128
COMPRESSED, MIXED = ("float-quantized", "naive-quantized"), "mixed-precision"
"""The supported formats of compressed-tensors, and its format for files in which each group of layers has its own."""
SUPPORTED = "only FP8 (e4m3, of modelopt, compressed-tensors and fp8), float32 and bfloat16 weights are"


@dataclass(frozen=True)
class Quantization:
    """The way in which a checkpoint's weights are scaled. Exactly the weights of dtype e4m3 have scales."""

    method: str  # the method's name in config.json
    block: tuple[int, int] | None  # rows and columns that share a scale; None: weights are scaled by row or as a whole


@dataclass(frozen=True)
class Scaled:
    """The scale of a tensor."""

    scale: StoredTensor
    block: tuple[int, int] | None  # see Quantization


def read_quantization(path: Path, config: ModelConfig) -> Quantization | None:
    """Read config.json's quantization_config, or hf_quant_config.json. Returns None if weights are not quantized.

    Raises ModelError for anything but the FP8 formats that are supported.
    """
    values = config.values.get("quantization_config") or _hf_quant_config(path)
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ModelError(f"quantization_config {values!r} is not supported: {SUPPORTED}")
    method = values.get("quant_method")
    if method == "modelopt":
        return _modelopt(values)
    if method == "fp8":
        return _block_scaled(values)
    if method == "compressed-tensors":
        return _compressed(values)
    raise ModelError(f"quantization_config {method!r} is not supported: {SUPPORTED}")


def _hf_quant_config(path: Path) -> dict[str, Any] | None:
    """Return hf_quant_config.json in the form of quantization_config. Older exports of modelopt have only this file."""
    file = path / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return {"quant_method": "modelopt", "quantization": values["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} does not say how the weights are quantized: {error!r}") from None


def _modelopt(values: Mapping[str, Any]) -> Quantization:
    """Read modelopt's settings. Without quant_algo, they concern only the KV cache, which Baton does not quantize."""
    values = values.get("quantization") or values
    layers = _objects(values, "quantized_layers")
    algorithms = {layer.get("quant_algo") for layer in layers} or {values.get("quant_algo")}
    refused = sorted(str(algorithm) for algorithm in algorithms - {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", None})
    if refused:
        raise ModelError(f"modelopt's quant_algo {listed(refused)} is not supported: {SUPPORTED}")
    return Quantization("modelopt", None)


def _block_scaled(values: Mapping[str, Any]) -> Quantization:
    if values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"quantization_config 'fp8' of fmt {values['fmt']!r} is not supported: {SUPPORTED}")
    return Quantization("fp8", _block(values.get("weight_block_size")))


def _compressed(values: Mapping[str, Any]) -> Quantization:
    groups = _objects(values, "config_groups")
    formats = [values.get("format")] if values.get("format") != MIXED else [group.get("format") for group in groups]
    if refused := [str(name) for name in formats if name not in COMPRESSED]:
        raise ModelError(f"compressed-tensors' format {listed(refused)} is not supported: {SUPPORTED}")
    weights = [_object(group, "weights") for group in groups]
    for scheme in weights:
        kind = {key: scheme.get(key) for key in ("type", "num_bits", "strategy")}
        if (kind["type"], kind["num_bits"]) != ("float", 8) or kind["strategy"] not in ("tensor", "channel", "block"):
            raise ModelError(f"compressed-tensors' weights {kind} are not supported: {SUPPORTED}")
    blocks = {_block(scheme.get("block_structure")) for scheme in weights if scheme["strategy"] == "block"}
    if len(blocks) > 1:
        different = sorted(map(str, blocks))
        raise ModelError(f"compressed-tensors' weights should all have the same block_structure, not {different}")
    return Quantization("compressed-tensors", blocks.pop() if blocks else None)


def _objects(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects in the object `name`; [] if that is null. Raises ModelError for other values."""
    found = _object(values, name)
    return [_object(found, key) for key in found]


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object `name`, or an empty one if it is null. Raises ModelError for other values."""
    value = values.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"quantization_config: {name} should be an object, not {value!r}")
    return value


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        return value[0], value[1]
    raise ModelError(f"quantization_config: a block should be two integers above 0, not {value!r}")


def pair_scales(
    stored: list[StoredTensor], quantization: Quantization | None
) -> tuple[list[StoredTensor], dict[str, Scaled]]:
    """Separate scales from weights: return the tensors that are not scales, and the scales by the names of the weights.

    Scales of activations, keys and values are left out. Raises ModelError for an FP8 weight without a scale, and for a
    scale with an unsuitable dtype or shape.
    """
    if quantization is None:
        return stored, {}
    by_name = {tensor.name: tensor for tensor in stored if not tensor.name.endswith(OF_ACTIVATIONS)}
    scaled, faults = dict[str, Scaled](), list[str]()
    for weight in [tensor for tensor in by_name.values() if tensor.dtype == FP8]:
        scale = next((by_name[weight.name + end] for end in SCALES if weight.name + end in by_name), None)
        if scale is None:
            faults.append(f"{weight.name} has no scale")
        elif scale.dtype not in SCALE_DTYPES:
            faults.append(f"{scale.name} has the dtype {scale.dtype}")
        elif not _fits(weight.shape, scale.shape, quantization.block):
            faults.append(f"{scale.name} {list(scale.shape)} does not fit {list(weight.shape)}")
        else:
            scaled[weight.name] = Scaled(scale, quantization.block)
    if faults:
        raise ModelError(f"{stored[0].file.parent} is not as its quantization_config says: {listed(faults)}")
    scales = {pair.scale.name for pair in scaled.values()}
    return [tensor for name, tensor in by_name.items() if name not in scales], scaled


def _fits(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Return whether a scale of this shape has one value for the whole weight, one per row, or one per block."""
    if len(weight) < 2:
        return False
    if math.prod(scale) == 1 or scale in (weight[:-1], (*weight[:-1], 1)):
        return True
    return block is not None and scale == (*weight[:-2], -(-weight[-2] // block[0]), -(-weight[-1] // block[1]))


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Multiply each value of the weight by the scale of its block, its row or the tensor, in float32; round to `dtype`.

    Blocks at the lower and right edges may be incomplete. Except for the result, only a few rows take memory at a time.
    """
    height, factors = _factors(weight.shape, scale.float(), block)
    result = torch.empty(weight.shape, dtype=dtype)
    parts = zip(torch.split(weight, height, -2), factors, torch.split(result, height, -2), strict=False)
    for values, factor, part in parts:
        part.copy_(values.float().mul_(factor))
    return result


def _factors(shape: torch.Size, scale: Tensor, block: tuple[int, int] | None) -> tuple[int, Iterable[Tensor]]:
    """Return how many rows to process at a time, and the factors for each of these groups of rows."""
    if scale.numel() == 1:
        return ROWS_AT_ONCE, repeat(scale.reshape(()))
    if scale.shape in (shape[:-1], (*shape[:-1], 1)):
        return ROWS_AT_ONCE, torch.split(scale.reshape(*shape[:-1], 1), ROWS_AT_ONCE, -2)
    assert block is not None
    return block[0], torch.split(scale.repeat_interleave(block[1], dim=-1)[..., : shape[-1]], 1, -2)
