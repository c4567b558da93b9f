"""The recipe of embeddings in sentence-transformers' files."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.config import ModelConfig, ModelError
from baton.models.loading.checkpoint import find_family
from baton.models.loading.pooling import DISABLED, NO_FILES, EmbeddingRecipe, PoolingOption, read_recipe

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.module."
KINDS = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def write_modules(folder: Path, pooling: Any, *kinds: str, prefix: str = OLD) -> None:
    modules = [
        {"path": f"{number}_{kind}" if number else "", "type": prefix + kind} for number, kind in enumerate(kinds)
    ]
    write(folder, "modules.json", modules)
    write(folder, "1_Pooling/config.json", pooling)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, EmbeddingRecipe("mean")),
        ({"pooling_mode_lasttoken": True}, EmbeddingRecipe("last")),
        ({"pooling_mode_cls_token": True}, EmbeddingRecipe("cls")),
        ({"pooling_mode": "lasttoken"}, EmbeddingRecipe("last")),
        ({"pooling_mode": "mean", "include_prompt": False}, EmbeddingRecipe("mean", pools_prompt=False)),
    ],
)
@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_pooling_of_the_files(tmp_path: Path, pooling: dict[str, Any], expected: EmbeddingRecipe, prefix: str) -> None:
    write_modules(tmp_path, pooling, *KINDS, prefix=prefix)
    assert read_recipe(tmp_path, "auto") == expected


def test_without_a_module_vectors_keep_their_length(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, *KINDS[:2])
    assert not read_recipe(tmp_path, "auto").normalizes
    assert read_recipe(tmp_path, "last") == EmbeddingRecipe("last")


def test_prompts(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "document: "}
    write(tmp_path, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "document"})
    recipe = read_recipe(tmp_path, "mean")
    assert (recipe.prompts, recipe.default_prompt) == (prompts, "document")
    write(tmp_path, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "other"})
    with pytest.raises(ValueError, match="default_prompt_name"):
        read_recipe(tmp_path, "mean")
    write(tmp_path, "config_sentence_transformers.json", {"prompts": [1]})
    with pytest.raises(ValueError, match="prompts"):
        read_recipe(tmp_path, "mean")


@pytest.mark.parametrize(
    ("pooling", "kinds", "named"),
    [
        ({"pooling_mode_max_tokens": True}, KINDS, "max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, KINDS, "mean_tokens, cls_token"),
        ({}, KINDS, "none"),
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense"), "Dense"),
        ({"pooling_mode_mean_tokens": True}, ("Transformer",), "Transformer"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, pooling: Any, kinds: tuple[str, ...], named: str) -> None:
    write_modules(tmp_path, pooling, *kinds)
    assert read_recipe(tmp_path, "auto").refusal.endswith(named)
    assert read_recipe(tmp_path, "mean") == EmbeddingRecipe("mean")


@pytest.mark.parametrize(("option", "refusal"), [("auto", NO_FILES), ("none", DISABLED)])
def test_models_without_embeddings(tmp_path: Path, option: PoolingOption, refusal: str) -> None:
    assert read_recipe(tmp_path, option).refusal == refusal


@pytest.mark.parametrize("text", ["[", "{}"])
def test_broken_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_recipe(tmp_path, "auto")


@pytest.mark.parametrize(
    "values",
    [{"architectures": ["Lfm2BidirectionalModel"]}, {"is_causal": False}, {"use_bidirectional_attention": True}],
)
def test_bidirectional_models_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"idirectional|is_causal"):
        find_family(ModelConfig({"model_type": "lfm2", **values}))
    find_family(ModelConfig({"model_type": "lfm2", "architectures": ["Lfm2Model"], "is_causal": True}))
