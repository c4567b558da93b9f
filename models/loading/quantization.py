"""Quantized checkpoints: which formats config.json names, and the weights that their stored tensors compose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.models.config import ModelConfig, ModelError, is_file, read_json
from baton.models.loading.formats.awq import read_awq
from baton.models.loading.formats.bitsandbytes import check_bitsandbytes, find_codes
from baton.models.loading.formats.composed import Composed, Misfit, Pool
from baton.models.loading.formats.compressed_tensors import SCHEMES, Compressed, check_scheme, read_scheme
from baton.models.loading.formats.fp4 import find_blocks, find_compressed, find_modelopt
from baton.models.loading.formats.fp8 import Block, fp8
from baton.models.loading.formats.gptq import read_gptq
from baton.models.loading.shards import StoredTensor, listed

OF_ACTIVATIONS = (
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale",
    ".input_global_scale", ".output_global_scale", ".input_zero_point", ".output_zero_point",
)  # fmt: skip
MIXED = "mixed-precision"
"""The format of compressed-tensors for files in which each group of layers has its own."""
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", None)
"""The supported algorithms of modelopt. Without one, its settings concern only the KV cache."""
KINDS = {"float4": "NVFP4", "float8": "FP8"}
"""modelopt's algorithms by the type and bits of a group of layers."""
SUPPORTED = (
    "supported are float32 and bfloat16 weights, FP8 (e4m3, of modelopt, compressed-tensors and fp8), int4 and int8 of "
    "compressed-tensors, AWQ (gemm), GPTQ of 4 and 8 bits, NVFP4, MXFP4, and NF4 and FP4 of bitsandbytes"
)
Find = Callable[[StoredTensor, Pool], Composed | None]
"""Function that returns the weight whose main tensor this is; None if it is none. Raises Misfit."""


@dataclass(frozen=True)
class Quantization:
    """The method that a checkpoint's weights are quantized with. Tensors' names and dtypes show which weights are."""

    method: str  # the method's name in config.json
    finds: tuple[Find, ...]
    may_keep: bool = False  # whether weights may stay integers in memory; the headers decide which ones do


def read_quantization(path: Path, config: ModelConfig) -> Quantization | None:
    """Read config.json's quantization_config, or hf_quant_config.json. Returns None if weights are not quantized.

    Raises ModelError for formats that are not supported.
    """
    values = config.values.get("quantization_config") or _hf_quant_config(path)
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ModelError(f"quantization_config {values!r} is not supported: {SUPPORTED}")
    method = str(values.get("quant_method"))
    if method not in READERS:
        raise ModelError(f"quantization_config {method!r} is not supported: {SUPPORTED}")
    return READERS[method](values)


def compose(stored: list[StoredTensor], quantization: Quantization | None) -> list[StoredTensor]:
    """Return the tensors with weights in place of the tensors that compose them, such as integers and scales.

    Scales of activations, keys and values are left out. Raises ModelError for tensors that are missing or do not fit.
    """
    if quantization is None:
        return stored
    pool = {tensor.name: tensor for tensor in stored if not tensor.name.endswith(OF_ACTIVATIONS)}
    found, faults = dict[str, Composed](), list[str]()
    for tensor in pool.values():
        try:
            weights = (find(tensor, pool) for find in quantization.finds)
            if (weight := next((weight for weight in weights if weight is not None), None)) is not None:
                found[tensor.name] = weight
        except Misfit as fault:
            faults.append(str(fault))
    used = {source.name for weight in found.values() for source in weight.sources}
    whole = [found.get(tensor.name, tensor) for name, tensor in pool.items() if name in found or name not in used]
    names = pool.keys() - used
    faults += [f"{weight.name} is stored in two ways" for weight in found.values() if weight.name in names]
    if faults:
        raise ModelError(f"{stored[0].file.parent} is not as its quantization_config says: {listed(faults)}")
    return whole


def _hf_quant_config(path: Path) -> dict[str, Any] | None:
    """Return hf_quant_config.json in the form of quantization_config. Older exports of modelopt have only this file."""
    file = path / "hf_quant_config.json"
    if not is_file(file):
        return None
    values = read_json(file)
    try:
        return {"quant_method": "modelopt", "quantization": values["quantization"]}
    except (KeyError, TypeError) as error:
        raise ModelError(f"{file} does not say how the weights are quantized: {error!r}") from None


def _modelopt(values: Mapping[str, Any]) -> Quantization:
    values = _object(values, "quantization") or values
    algorithms = [layer.get("quant_algo") for layer in _objects(values, "quantized_layers")]
    if not algorithms and values.get("quant_algo") == "MIXED_PRECISION":
        weights = [_object(group, "weights") for group in _objects(values, "config_groups")]
        algorithms = [KINDS.get(f"{each.get('type')}{each.get('num_bits')}", "MIXED_PRECISION") for each in weights]
    algorithms = algorithms or [values.get("quant_algo")]
    refused = sorted({str(algorithm) for algorithm in algorithms if algorithm not in ALGORITHMS})
    if refused:
        raise ModelError(f"modelopt's quant_algo {listed(refused)} is not supported: {SUPPORTED}")
    return Quantization("modelopt", (fp8(None), find_modelopt) if "NVFP4" in algorithms else (fp8(None),))


def _block_scaled(values: Mapping[str, Any]) -> Quantization:
    if values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"quantization_config 'fp8' of fmt {values['fmt']!r} is not supported: {SUPPORTED}")
    return Quantization("fp8", (fp8(_block(values.get("weight_block_size"))),))


def _compressed(values: Mapping[str, Any]) -> Quantization:
    groups = _objects(values, "config_groups")
    general = values.get("format")
    formats = [str(general if general != MIXED else group.get("format")) for group in groups] or [str(general)]
    if refused := [name for name in formats if name not in SCHEMES]:
        raise ModelError(f"compressed-tensors' format {listed(refused)} is not supported: {SUPPORTED}")
    blocks, schemes = set[Block | None](), []
    for layout, group in zip(formats, groups, strict=False):
        weights = _object(group, "weights")
        check_scheme(layout, weights, SUPPORTED)
        if weights["type"] == "int":
            schemes.append(read_scheme(group, weights))
        elif weights["strategy"] == "block":
            blocks.add(_block(weights.get("block_structure")))
    if len(blocks) > 1:
        different = sorted(map(str, blocks))
        raise ModelError(f"compressed-tensors' weights should all have the same block_structure, not {different}")
    finds = fp8(blocks.pop() if blocks else None), find_compressed, Compressed(tuple(schemes)).find
    return Quantization("compressed-tensors", finds, may_keep=bool(schemes))


def _awq(values: Mapping[str, Any]) -> Quantization:
    return Quantization("awq", (read_awq(values, SUPPORTED).find,), may_keep=True)


def _gptq(values: Mapping[str, Any]) -> Quantization:
    settings = read_gptq(values, SUPPORTED)
    return Quantization("gptq", (settings.find,), may_keep=not settings.is_ordered)


def _bitsandbytes(values: Mapping[str, Any]) -> Quantization:
    check_bitsandbytes(values, SUPPORTED)
    return Quantization("bitsandbytes", (find_codes,))


READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "fp8": _block_scaled,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda values: Quantization("mxfp4", (find_blocks,)),
    "bitsandbytes": _bitsandbytes,
}
"""Readers of settings by quant_method."""


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
