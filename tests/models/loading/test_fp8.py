"""FP8 checkpoints, quantized by the tests: the model must equal the model of the dequantized weights exactly."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from baton.models.config import ModelError
from baton.models.families.mamba2 import FAMILY
from baton.models.loading import checkpoint
from baton.models.loading.checkpoint import load_model
from tests.models.loading.test_loading import Change, assert_loads_alike, copied, load, run
from tests.models.loading.test_pieces import fuse, fused
from tests.models.oracle import Oracle

LARGEST = 448.0
ROWS, COLUMNS = 48, 20
"""Size of a block. It is smaller than the weights, and does not divide the sizes of most of them."""
PROJECTION = re.compile(r".*(_proj(_[a-z]+)?|_linear|\.w[123])(\.\d)?(\.weight)?")


@dataclass(frozen=True)
class Format:
    """The format in which a tool stores FP8 weights and their scales."""

    config: dict[str, Any]  # the quantization_config
    block: Callable[[int, int], tuple[int, int]]  # (a weight's rows, columns) → rows and columns that share a scale
    shape: Callable[[Tensor], Tensor] = lambda scale: scale  # reshapes the scales [blocks, blocks] as they are stored
    name: str = "_scale"  # suffix of a weight's name in the name of its scales
    dtype: torch.dtype = torch.float32  # dtype of the scales
    in_own_file: bool = False  # whether the config is in hf_quant_config.json instead of config.json


def group(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True, **more}
    return {"weights": weights, "targets": ["Linear"]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    groups = {"group_0": group(strategy, **more)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": []}


def mixed(*formats: str) -> dict[str, Any]:
    groups = {f"group_{at}": {**group("channel"), "format": name} for at, name in enumerate(formats)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, COLUMNS], "modules_to_not_convert": []}
FORMATS = {
    "modelopt": Format(MODELOPT, lambda rows, columns: (rows, columns), lambda scale: scale.reshape(())),
    "modelopt's own file": Format(
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        lambda rows, columns: (rows, columns),
        lambda scale: scale.reshape(()),
        in_own_file=True,
    ),
    "modelopt by channel": Format(
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda rows, columns: (1, columns),
        lambda scale: scale.flatten(),
    ),
    "fp8 by block": Format(BLOCKS, lambda rows, columns: (ROWS, COLUMNS), name="_scale_inv", dtype=torch.bfloat16),
    "compressed": Format(compressed("tensor"), lambda rows, columns: (rows, columns), lambda scale: scale.flatten()),
    "compressed by channel": Format(compressed("channel"), lambda rows, columns: (1, columns)),
    "compressed, weights alone": Format(
        {**compressed("channel"), "format": "naive-quantized"}, lambda rows, columns: (1, columns)
    ),
    "compressed in groups": Format(mixed("float-quantized", "naive-quantized"), lambda rows, columns: (1, columns)),
    "compressed by block": Format(
        compressed("block", block_structure=[ROWS, COLUMNS]), lambda rows, columns: (ROWS, COLUMNS)
    ),
}


def blockwise(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude in each block of each matrix."""
    if weight.ndim > 2:
        return torch.stack([blockwise(matrix, block) for matrix in weight])
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    largest = [[weight[i : i + block[0], j : j + block[1]].abs().max() for j in columns] for i in rows]
    return torch.tensor(largest)


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return the scale of each element, float64 of `shape`."""
    rows, columns = (torch.arange(size) // step for size, step in zip(shape[-2:], block, strict=True))
    return scale.double()[..., rows, :][..., columns]


def quantize(path: Path, way: Format) -> dict[str, Tensor]:
    """Quantize a checkpoint's projections to FP8; return all tensors, dequantized in float64."""
    tensors, meant = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for name, weight in tensors.copy().items():
        meant[name] = weight.double()
        if not PROJECTION.fullmatch(name) or weight.ndim < 2:
            continue
        block = way.block(*weight.shape[-2:])
        scale = (blockwise(weight, block) / LARGEST).to(way.dtype)
        each = spread(scale, block, weight.shape)
        values = (weight.double() / each).float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        meant[name] = values.double() * each
        tensors |= {name: values, name + way.name: way.shape(scale).contiguous()}
        tensors[name.removesuffix(".weight") + ".input_scale"] = torch.tensor(0.5)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name.replace("_proj.weight", "_proj.") + name[-13] + "_scale"] = torch.tensor(0.25)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    save_file(tensors, path / "model.safetensors")
    if way.in_own_file:
        (path / "hf_quant_config.json").write_text(json.dumps(way.config))
    else:
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**values, "quantization_config": way.config}))
    return meant


@pytest.mark.parametrize("name", ["mamba2-groups", "nemotron_h", "granitemoehybrid-rope"])
@pytest.mark.parametrize("way", FORMATS)
def test_a_model_has_its_dequantized_weights(oracle: Oracle, tmp_path: Path, name: str, way: str) -> None:
    path, plain = (copied(oracle.checkpoint(name), tmp_path / folder) for folder in ("fp8", "plain"))
    original = load_file(plain / "model.safetensors")
    meant = quantize(path, FORMATS[way])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    assert_loads_alike(path, plain)
    for weight, exact in original.items():
        # Neighbouring e4m3 numbers differ by an eighth of their power of two; below 2⁻⁶ (times the scale) by 2⁻⁹.
        step = exact.double().abs().clamp(min=exact.abs().max() / LARGEST * 2**-6) / 8
        assert ((meant[weight] - exact).abs() <= step).all()


@pytest.mark.parametrize("name", ["mamba2-groups", "nemotron_h", "granitemoehybrid-rope"])
def test_logits_differ_as_much_as_transformers_logits_with_these_weights(
    oracle: Oracle, tmp_path: Path, name: str
) -> None:
    original, tokens = oracle.checkpoint(name), (torch.arange(24) * 7).tolist()
    path, plain = (copied(original, tmp_path / folder) for folder in ("fp8", "plain"))
    meant = quantize(path, FORMATS["fp8 by block"])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    exact, expected, found = oracle.logits(original, tokens), oracle.logits(plain, tokens), run(load(path))
    assert (expected - exact).abs().max() > 0.01
    torch.testing.assert_close(found - exact, expected - exact, atol=1e-4, rtol=0)


FUSED = ["granitemoehybrid-moe", "nemotron_h-moe", "qwen3_next-moe", "qwen3_5_moe", "kimi_linear-moe", "lfm2_moe"]


@pytest.mark.parametrize("name", FUSED)
def test_experts_and_fused_projections_are_dequantized(oracle: Oracle, tmp_path: Path, name: str) -> None:
    path, plain = (copied(oracle.checkpoint(name), tmp_path / folder) for folder in ("fp8", "plain"))
    meant = quantize(path, FORMATS["fp8 by block"])
    quantized = [name for name, tensor in load_file(path / "model.safetensors").items() if tensor.itemsize == 1]
    assert all(any(re.search(part, name) for name in quantized) for part in ("experts|_moe", "in_proj|q_proj"))
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    assert_loads_alike(path, plain)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next-moe", "kimi_linear-moe"])
def test_quantized_weights_are_made_of_the_dequantized_ones(
    oracle: Oracle, tmp_path: Path, name: str, bits: int
) -> None:
    path, plain = (copied(oracle.checkpoint(name), tmp_path / folder) for folder in ("fp8", "plain"))
    meant = quantize(path, FORMATS["fp8 by block"])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    found, expected = (load_model(folder, None, torch.device("cpu"), bits=bits) for folder in (path, plain))
    assert isinstance(found, nn.Module) and isinstance(expected, nn.Module)
    weights, floats = dict(expected.named_parameters()), 0
    for leaf, weight in found.named_parameters():
        assert torch.equal(weight, weights.pop(leaf)), leaf
        floats += leaf.endswith("float_weight")
    assert not weights and floats


def take_apart(tensors: dict[str, Tensor]) -> None:
    """Store a Granite checkpoint's experts one by one, as llm-compressor does."""
    for name in [name for name in tensors if ".block_sparse_moe." in name and "router" not in name]:
        owner, _, stack = name.rpartition(".block_sparse_moe.")
        parts = {"input_linear.weight": ("gate", "up"), "output_linear.weight": ("down",)}[stack]
        for number, weight in enumerate(tensors.pop(name)):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{owner}.block_sparse_moe.experts.{number}.{part}_proj.weight"] = rows.contiguous()


@pytest.mark.parametrize("way", ["compressed by channel", "compressed"])
def test_separate_experts_of_a_granite_are_dequantized(oracle: Oracle, tmp_path: Path, way: str) -> None:
    original = oracle.checkpoint("granitemoehybrid-moe")
    path = copied(original, tmp_path / "fp8", tensors=take_apart)
    assert_loads_alike(path, original)
    plain = copied(path, tmp_path / "plain")
    meant = quantize(path, FORMATS[way])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    assert_loads_alike(path, plain)


def test_weights_get_the_models_dtype(oracle: Oracle, tmp_path: Path) -> None:
    path, plain = (copied(oracle.checkpoint("nemotron_h"), tmp_path / folder) for folder in ("fp8", "plain"))
    meant = quantize(path, FORMATS["fp8 by block"])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    found, expected = (run(load(folder, torch.bfloat16)) for folder in (path, plain))
    assert torch.equal(found, expected)


def test_a_scaled_tensor_fills_parts(oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.FAMILIES, "mamba2", replace(FAMILY, pieces=fused))
    path, plain = (copied(oracle.checkpoint("mamba2"), tmp_path / folder, tensors=fuse) for folder in ("fp8", "plain"))
    meant = quantize(path, FORMATS["fp8 by block"])
    save_file({name: tensor.float() for name, tensor in meant.items()}, plain / "model.safetensors")
    assert_loads_alike(path, plain)


WEIGHT = "backbone.layers.1.mixer.in_proj.weight"


def lose_scale(tensors: dict[str, Any]) -> None:
    del tensors[WEIGHT + "_scale_inv"]


def misshape_scale(tensors: dict[str, Any]) -> None:
    tensors[WEIGHT + "_scale_inv"] = torch.ones(3, 4)


def scale_by_exponents(tensors: dict[str, Any]) -> None:
    tensors[WEIGHT + "_scale_inv"] = tensors[WEIGHT + "_scale_inv"].to(torch.float8_e8m0fnu)


def scale_nothing(tensors: dict[str, Any]) -> None:
    tensors["backbone.norm_f.weight_scale_inv"] = torch.ones(1)


def break_scale(tensors: dict[str, Any]) -> None:
    tensors[WEIGHT + "_scale_inv"][1, 1] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_scale, r"not as its quantization_config says: \S*1\.mixer\.in_proj\.weight has no scale"),
        (misshape_scale, r"in_proj\.weight_scale_inv \[3, 4\] does not fit \[296, 64\]"),
        (scale_by_exponents, r"in_proj\.weight_scale_inv has the dtype F8_E8M0"),
        (scale_nothing, r"surplus tensors: backbone\.norm_f\.weight_scale_inv"),
        (break_scale, r"1\.mixer\.in_proj\.weight holds NaN or infinity"),
    ],
)
def test_scales_that_do_not_fit_are_named(oracle: Oracle, tmp_path: Path, change: Change, message: str) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "fp8")
    quantize(path, FORMATS["fp8 by block"])
    with pytest.raises(ModelError, match=message):
        load(copied(path, tmp_path / "changed", tensors=change))


REFUSED: list[tuple[Any, str]] = [
    *(({"quant_method": method}, f"{method}' is not") for method in ("hqq", "eetq", "auto-round", "quark", "int8")),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt's quant_algo NVFP4_AWQ is not supported"),
    (
        {"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}},
        "quant_algo W4A8_AWQ is not supported",
    ),
    ({**compressed("group"), "format": "marlin-24"}, "format marlin-24 is not supported"),
    ({**compressed("group"), "format": "pack-quantized"}, "of format pack-quantized are not supported"),
    ({**compressed("tensor"), "format": "nvfp4-pack-quantized"}, "of format nvfp4-pack-quantized are not supported"),
    (
        compressed("channel", type="int"),
        r"weights \{'type': 'int', 'num_bits': 8, 'strategy': 'channel'\} of for",
    ),
    (compressed("group"), r"'strategy': 'group'\} of format float-quantized are not supported"),
    (compressed("block", block_structure=[128, 0]), r"two integers above 0, not \[128, 0\]"),
    ({**BLOCKS, "fmt": "e5m2"}, "'fp8' of fmt 'e5m2' is not supported"),
    ({**BLOCKS, "weight_block_size": "128x128"}, "two integers above 0, not '128x128'"),
    ("int4", "quantization_config 'int4' is not supported"),
    (mixed("float-quantized", "pack-quantized"), "of format pack-quantized are not supported"),
    ({**compressed("tensor"), "config_groups": [1]}, r"config_groups should be an object, not \[1\]"),
    ({**compressed("tensor"), "config_groups": {"a": {"weights": 8}}}, "weights should be an object, not 8"),
    ({**MODELOPT, "quantized_layers": ["a"]}, r"quantized_layers should be an object, not \['a'\]"),
    ({**MODELOPT, "quantized_layers": {"a": "FP8"}}, "a should be an object, not 'FP8'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_other_quantizations_are_refused_by_name(oracle: Oracle, tmp_path: Path, config: Any, message: str) -> None:
    change = {"quantization_config": config}
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy", config=lambda values: values.update(change))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_weights_are_unchanged_if_only_keys_and_values_are_quantized(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("nemotron_h")
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}

    def scale_keys(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("k_proj.weight")]:
            tensors[name.replace("k_proj.weight", "k_proj.k_scale")] = torch.tensor(0.5)

    change = {"quantization_config": config}
    path = copied(original, tmp_path / "copy", config=lambda values: values.update(change), tensors=scale_keys)
    assert_loads_alike(path, original)


def test_an_unusable_file_of_modelopt_is_named(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy")
    (path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json does not say how"):
        load(path)
