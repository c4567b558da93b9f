"""Quantized safetensors that do not fit, or that are not supported: a ModelError names the tensor or the setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.config import ModelError
from tests.models.loading.formats.test_formats import written
from tests.models.loading.formats.writing import NVFP4, WAYS, Way, packed, settings
from tests.models.loading.test_loading import assert_loads_alike, copied, load
from tests.models.oracle import Oracle

LAYER = "backbone.layers.2.mixer.q_proj."
OPTIONAL = ("g_idx", "input_scale", "input_global_scale")


def lose(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def lengthen(tensors: dict[str, Tensor], name: str) -> None:
    tensor = tensors[name].reshape(-1) if tensors[name].ndim == 0 else tensors[name]
    tensors[name] = torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)


def widen(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].reshape(*tensors[name].shape, 1, 1)


def empty(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:0] if tensors[name].ndim else tensors[name].reshape(1)[:0]


def retype(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int16)


@pytest.mark.parametrize("change", [lose, lengthen, empty, retype, widen])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_do_not_fit_are_named(
    oracle: Oracle, tmp_path: Path, way: str, change: Callable[[dict[str, Tensor], str], None]
) -> None:
    path, _ = written(oracle, tmp_path, "nemotron_h", WAYS[way])
    file = path / "model.safetensors"
    original = load_file(file)
    names = [name for name in original if name.startswith(LAYER)]
    assert len(names) > 1
    for name in names:
        if name.endswith(OPTIONAL) and (change is lose or "scale" in name) and "ordered" not in way:
            continue
        tensors = dict(original)
        change(tensors, name)
        save_file({key: each.contiguous() for key, each in tensors.items()}, file)
        if change is widen and (original[name].numel() == 1 or "bitsandbytes" in str(WAYS[way].config)):
            continue  # One number is one number, and bitsandbytes' tensors are flat.
        with pytest.raises(ModelError, match=LAYER.replace(".", r"\.")) as raised:
            load(path)
        weight = next(key for key in names if key.endswith(("weight", "packed", "blocks", "qweight")))
        assert name in str(raised.value) or weight.rpartition(".")[0] in str(raised.value)


@pytest.mark.parametrize(
    ("way", "end", "value", "message"),
    [
        ("gptq, ordered", "g_idx", 9, r"q_proj\.g_idx should have the numbers of groups from 0 to 1, not 0 to 9"),
        ("gptq", "g_idx", -2, r"q_proj\.g_idx should have the numbers of groups from 0 to 1, not -2 to 1"),
        ("awq", "scales", float("nan"), r"q_proj\.weight holds NaN or infinity"),
        ("packed", "weight_shape", 40, r"q_proj\.weight_shape holds \[96, 40\], but the tensors have \[96, 64\]"),
        ("nvfp4 of modelopt", "weight_scale_2", float("inf"), r"q_proj\.weight holds NaN or infinity"),
        ("mxfp4", "weight_scales", 255, r"q_proj\.weight holds NaN or infinity"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", 0, r"__nf4 does not hold the settings of a weight"),
        ("nf4", "weight.absmax", float("inf"), r"q_proj\.weight holds NaN or infinity"),
    ],
)
def test_values_that_do_not_fit_are_named(
    oracle: Oracle, tmp_path: Path, way: str, end: str, value: float, message: str
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        flat = tensors[LAYER + end].view(-1)
        flat[3 % len(flat)] = value

    path = copied(written(oracle, tmp_path, "nemotron_h", WAYS[way])[0], tmp_path / "changed", tensors=change)
    with pytest.raises(ModelError, match=message):
        load(path)


def state(text: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        name = LAYER + "weight.quant_state.bitsandbytes__nf4"
        tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"blocksize": 64}', "does not hold the settings of a weight: KeyError"),
        ("[1]", "does not hold the settings of a weight: TypeError"),
        ('{"blocksize": 64, "shape": null}', "does not hold the settings of a weight: TypeError"),
        ('{"blocksize": 64, "shape": [64, 32]}', r"says the shape \[64, 32\], which does not fit"),
        ('{"blocksize": 64, "shape": [-64, -64]}', r"says the shape \[-64, -64\], which does not fit"),
        ('{"blocksize": 64, "shape": [64, 96]}', r"q_proj\.weight \[64, 96\], expected"),
        ('{"blocksize": 32, "shape": [96, 64]}', "says blocks of 32, which do not fit"),
        ('{"blocksize": 64, "shape": [1e999]}', "does not hold the settings of a weight: OverflowError"),
        ("[" * 60_000, "does not hold the settings of a weight: RecursionError"),
        (f'{{"blocksize": {2**45}, "shape": [96, 64]}}', f"says blocks of {2**45}, which do not fit"),
        ("{" + " " * 70_000 + "}", "has 70002 bytes, but settings have at most 65536"),
    ],
)
def test_settings_of_bitsandbytes_that_do_not_fit_are_named(
    oracle: Oracle, tmp_path: Path, text: str, message: str
) -> None:
    path, _ = written(oracle, tmp_path, "nemotron_h", WAYS["nf4"])
    with pytest.raises(ModelError, match=message):
        load(copied(path, tmp_path / "changed", tensors=state(text)))


@pytest.mark.parametrize("target", ["re:" + "(" * 900, "re:a{99999999999999}", "re:" + "a" * 2000])
def test_targets_that_are_no_patterns_are_refused(oracle: Oracle, tmp_path: Path, target: str) -> None:
    """Targets are compared with layers' names only if there are two groups of layers with different settings."""
    path, _ = written(oracle, tmp_path, "nemotron_h", WAYS["packed"])
    other = settings("pack-quantized", num_bits=8, strategy="channel")["config_groups"]["group_0"]

    def change(config: dict[str, Any]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = other
        groups["group_0"]["targets"] = [target]

    with pytest.raises(ModelError, match="is not a pattern"):
        load(copied(path, tmp_path / "changed", config=change))


def test_zeros_beyond_the_bits_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    """The 4-bit form in memory could not represent them, so a kept weight would differ from a dequantized one."""

    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("weight_zero_point")]:
            shape = tensors[name.replace("zero_point", "scale")].shape
            tensors[name] = torch.full(shape, 125, dtype=torch.int8)

    path, _ = written(oracle, tmp_path, "nemotron_h", WAYS["packed, asymmetric"])
    with pytest.raises(ModelError, match="holds zeros from 125 to 125, which 4 bits do not represent"):
        load(copied(path, tmp_path / "changed", tensors=change))


def test_a_weight_that_is_stored_in_two_ways_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, Any]) -> None:
        tensors[LAYER + "weight"] = torch.zeros(64, 64)

    path, _ = written(oracle, tmp_path, "nemotron_h", WAYS["awq"])
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored in two ways"):
        load(copied(path, tmp_path / "changed", tensors=repeat))


def test_layers_have_their_own_settings(oracle: Oracle, tmp_path: Path) -> None:
    """A pattern selects keys and values for 4 bits, and the layers' class selects the other projections for 8 bits."""
    four, eight = packed(4, 32, symmetric=True), packed(8, None, symmetric=False)
    config = settings("pack-quantized", num_bits=8, strategy="channel", symmetric=False)
    of_keys = four.config["config_groups"]["group_0"] | {"targets": [r"re:.*[kv]_proj$"]}
    config["config_groups"] = {"group_0": of_keys, "group_1": config["config_groups"]["group_0"]}
    shapes = {(48, 64)}
    way = Way(config, lambda weight: (four if tuple(weight.shape) in shapes else eight).write(weight))
    path, plain = written(oracle, tmp_path, "nemotron_h", way)
    names = {name for name in load_file(path / "model.safetensors") if name.endswith("weight_packed")}
    assert any("k_proj" in name for name in names) and any("in_proj" in name for name in names)
    assert_loads_alike(path, plain)


AWQ, GPTQ, NF4 = (WAYS[name].config for name in ("awq", "gptq", "nf4"))
PACKED = WAYS["packed"].config


def with_weights(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**AWQ, "version": "gemv"}, "AWQ's version 'gemv' is not supported: supported are float32"),
    ({**AWQ, "bits": 8}, "AWQ of 8 bits is not supported"),
    ({**AWQ, "zero_point": False}, "AWQ with zero_point false is not supported"),
    ({**AWQ, "group_size": 0}, "group_size should be above 0 or -1, not 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ's checkpoint_format 'marlin' is not supported"),
    ({**GPTQ, "bits": 3}, "GPTQ of 3 bits is not supported"),
    ({**GPTQ, "bits": [4]}, r"GPTQ of \[4\] bits is not supported"),
    ({**GPTQ, "group_size": "128"}, "group_size should be above 0 or -1, not '128'"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes' load_in_8bit is not supported"),
    ({**NF4, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is not supported"),
    ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16' is not supported"),
    (with_weights(PACKED, num_bits=3), r"weights \{'type': 'int', 'num_bits': 3, 'strategy': 'group'\} of format pack"),
    (with_weights(PACKED, strategy="block"), "'strategy': 'block'} of format pack-quantized are not supported"),
    (with_weights(PACKED, strategy=["group"]), r"'strategy': \['group'\]\} of format pack-quantized are not"),
    (with_weights(PACKED, group_size=None), "group_size should be above 0, not None"),
    (with_weights(PACKED, group_size=2**62), f"group_size should be above 0, not {2**62}"),
    (with_weights(PACKED, num_bits=4.0), r"'num_bits': 4\.0, 'strategy': 'group'\} of format pack-quantized are not"),
    (with_weights(NVFP4, num_bits=6), "'num_bits': 6, 'strategy': 'tensor_group'} of format nvfp4-pack-quantized are"),
    ({**PACKED, "format": "marlin-24"}, "compressed-tensors' format marlin-24 is not supported"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt's quant_algo W4A8_AWQ is not supported"),
    ({"quant_method": "modelopt", "quantization": "x"}, "quantization should be an object, not 'x'"),
    ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, r"modelopt's quant_algo \['FP8'\] is not supported"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_variants_are_refused_by_name(oracle: Oracle, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    change = {"quantization_config": config}
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy", config=lambda values: values.update(change))
    with pytest.raises(ModelError, match=message):
        load(path)
