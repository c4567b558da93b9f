"""How the files of Qwen's families fill a model: stacked or separate experts, and tensors that are left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.models.config import ModelError, read_config
from baton.models.decoder import Decoder
from baton.models.loading.checkpoint import load_model
from tests.models.loading.test_loading import CPU, assert_loads_alike, copied, load
from tests.models.oracle import Oracle


def stack(tensors: dict[str, Any]) -> None:
    """Stack the experts of a layer: one tensor for gate and up joined, one for down."""
    for owner in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        matrices: dict[str, list[Tensor]] = {
            part: [tensors.pop(f"{owner}.experts.{number}.{part}_proj.weight") for number in range(5)]
            for part in ("gate", "up", "down")
        }
        pairs = zip(matrices["gate"], matrices["up"], strict=True)
        tensors[f"{owner}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{owner}.experts.down_proj"] = torch.stack(matrices["down"])


@pytest.mark.parametrize("name", ["qwen3_next-moe", "qwen3_5_moe"])
def test_experts_load_alike_from_a_stack_and_one_by_one(oracle: Oracle, tmp_path: Path, name: str) -> None:
    original = oracle.checkpoint(name)
    assert_loads_alike(copied(original, tmp_path / "copy", tensors=stack), original)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_multi_token_prediction_is_left_out(oracle: Oracle, tmp_path: Path, name: str) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(3)

    original = oracle.checkpoint(name)
    assert_loads_alike(copied(original, tmp_path / "copy", tensors=add), original)


def test_the_text_part_of_a_vision_model_equals_a_text_model(oracle: Oracle, tmp_path: Path) -> None:
    """Tensor names without the vision model's prefix, and a config.json without text_config, give the same model."""

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        config.clear()
        config.update(text)

    def strip(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            value = tensors.pop(name)
            if "visual" not in name:
                tensors[name.replace("language_model.", "")] = value

    original = oracle.checkpoint("qwen3_5")
    assert any("visual" in name for name in names(original))
    assert_loads_alike(copied(original, tmp_path / "copy", config=flatten, tensors=strip), original)


def names(path: Path) -> list[str]:
    from safetensors.torch import load_file

    return list(load_file(path / "model.safetensors"))


def test_text_config_is_moved_to_the_top_level(oracle: Oracle, tmp_path: Path) -> None:
    def split(config: dict[str, Any]) -> None:
        config.pop("dtype", None)
        config["text_config"]["dtype"] = "bfloat16"
        config["hidden_size"] = None

    path = copied(oracle.checkpoint("qwen3_5"), tmp_path / "copy", config=split)
    config = read_config(path)
    assert config.dtype() == torch.bfloat16
    assert config.integer("hidden_size") == 64 and config.values["model_type"] == "qwen3_5"


def test_an_expert_too_many_and_a_projection_too_few_are_named(oracle: Oracle, tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.experts"

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"{layer}.5.up_proj.weight"] = torch.ones(24, 64)

    def lose(tensors: dict[str, Any]) -> None:
        del tensors[f"{layer}.3.up_proj.weight"]

    original = oracle.checkpoint("qwen3_next-moe")
    with pytest.raises(ModelError, match=r"surplus tensors: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        load(copied(original, tmp_path / "more", tensors=add))
    with pytest.raises(ModelError, match=r"not filled once: model\.layers\.1\.mlp\.experts\.input_linear"):
        load(copied(original, tmp_path / "fewer", tensors=lose))


def test_layers_are_sparse_or_dense_as_the_config_says(oracle: Oracle) -> None:
    found = {}
    for name in ("qwen3_next", "qwen3_next-moe", "qwen3_next-experts", "qwen3_5_moe"):
        model = load_model(oracle.checkpoint(name), None, CPU)
        assert isinstance(model, Decoder)
        found[name] = [type(mlp_of(block)).__name__ for block in model.model.layers]
    dense, sparse = "GatedMLP", "SparseMLP"
    assert found == {
        "qwen3_next": [dense] * 4,
        "qwen3_next-moe": [dense, sparse, dense, sparse],
        "qwen3_next-experts": [sparse, dense],
        "qwen3_5_moe": [sparse] * 4,
    }


def mlp_of(block: nn.Module) -> nn.Module:
    mlp = block.mlp
    assert isinstance(mlp, nn.Module)
    return mlp
