"""Kimi Linear's config.json, with nested or flat sizes of its linear layers, and its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder
from baton.models.families.kimi_linear import read_kda, read_layers, read_mlps
from baton.models.loading.checkpoint import load_model, random_model
from tests.models.oracle import CHECKPOINTS, Oracle, settings_of

CPU = torch.device("cpu")
LISTS = {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 5, "head_dim": 12}


def config(**changed: Any) -> ModelConfig:
    return ModelConfig({"num_hidden_layers": 3, "hidden_size": 8, "linear_attn_config": LISTS, **changed})


def test_layers_are_counted_from_1_in_the_lists_of_the_files() -> None:
    assert read_layers(config()) == ["linear_attention", "full_attention", "linear_attention"]
    kinds = ["full_attention", "full_attention", "linear_attention"]
    assert read_layers(config(layer_types=kinds)) == kinds


@pytest.mark.parametrize(
    "lists",
    [
        {"kda_layers": [0, 1], "full_attn_layers": [2]},
        {"kda_layers": [1, 2, 3], "full_attn_layers": [2]},
        {"kda_layers": [1, 2]},
        {},
    ],
)
def test_lists_that_do_not_name_each_layer_once_are_refused(lists: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="should name each layer from 1 to 3 once"):
        read_layers(config(linear_attn_config=lists))


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, not num_hidden_layers = 3"),
        ({"layer_types": ["mamba"] * 3}, "unknown layers mamba in layer_types"),
        ({"linear_attn_config": [1]}, "linear_attn_config should be an object"),
    ],
)
def test_unknown_layers_are_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        read_layers(config(**changed))


def test_layers_with_experts() -> None:
    assert read_mlps(config()) == ["dense", "sparse", "sparse"]
    assert read_mlps(config(first_k_dense_replace=0, moe_layer_freq=2)) == ["sparse", "dense", "sparse"]
    assert read_mlps(config(mlp_layer_types=["sparse", "dense", "dense"])) == ["sparse", "dense", "dense"]


def test_sizes_of_the_linear_layers_in_both_styles() -> None:
    """The linear layers have a head size of their own; the head_dim at the top level is another one."""
    nested = read_kda(config(head_dim=72), torch.float32)
    assert (nested.heads, nested.width, nested.kernel) == (5, 12, 4)
    flat = config(linear_attn_config=None, head_dim=72, linear_num_heads=3, linear_head_dim=7, linear_conv_kernel_dim=2)
    found = read_kda(flat, torch.float32)
    assert (found.heads, found.width, found.kernel) == (3, 7, 2)


@pytest.mark.parametrize(
    ("name", "changed", "fault"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act"),
        ("kimi_linear-moe", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi_linear-moe", {"num_experts_per_tok": 9}, "cannot have 9 of 8 experts"),
    ],
)
def test_settings_that_are_not_supported_are_refused(name: str, changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        random_model({**settings_of(name), **changed}, torch.float32, CPU, 0)


def test_files_have_the_published_names(oracle: Oracle) -> None:
    """transformers writes the tensor names of the hub's files, so parity with its files covers the hub's files."""
    from safetensors.torch import load_file

    found = load_file(oracle.checkpoint("kimi_linear-moe") / "model.safetensors")
    for name in ("0.self_attn.k_conv1d", "0.self_attn.f_a_proj", "1.block_sparse_moe.experts.7.w3"):
        assert f"model.layers.{name}.weight" in found
    assert found["model.layers.0.self_attn.A_log"].shape == (1, 1, 5, 1)


def test_every_parameter_is_filled_in_the_kernels_layout(oracle: Oracle) -> None:
    model = load_model(oracle.checkpoint("kimi_linear-odd"), None, CPU)
    assert isinstance(model, Decoder)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, nn.Module)
    shapes = {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}
    assert shapes["k_b_proj.weight"] == (3, 13, 7) and shapes["v_b_proj.weight"] == (3, 9, 13)
    assert model.kv_specs()[0].shape == (1, 15)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name.startswith("kimi")])
@pytest.mark.parametrize("lost", ["k_conv1d.weight", "f_a_proj.weight", "kv_b_proj.weight"])
def test_a_part_that_is_missing_is_named(oracle: Oracle, tmp_path: Path, name: str, lost: str) -> None:
    from tests.models.loading.test_loading import copied

    def lose(tensors: dict[str, Any]) -> None:
        del tensors[next(tensor for tensor in tensors if tensor.endswith(lost))]

    with pytest.raises(ModelError, match=r"missing tensors|parameters not filled once"):
        load_model(copied(oracle.checkpoint(name), tmp_path / "copy", tensors=lose), None, CPU)
