"""Files that would crash the reader, fill memory or never end are refused with one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.models.config import MOST_BYTES, MOST_LAYERS, ModelConfig, ModelError, read_config, read_json
from baton.models.loading.checkpoint import find_family, load_model
from baton.models.loading.fingerprint import configuration
from baton.models.loading.pooling import read_recipe
from baton.models.loading.quantization import read_quantization
from baton.models.loading.shards import find_shards, read_headers
from baton.models.text.tokenizer import load_template, load_text
from tests.models.loading.test_pooling import KINDS, write_modules

DEEP = b"[" * 100_000
HUGE = 10**400
Read = Callable[[Path], Any]


def read_text(folder: Path) -> None:
    load_text(folder)


def quantization_of(folder: Path) -> None:
    read_quantization(folder, ModelConfig({}))


def recipe_of(folder: Path) -> None:
    read_recipe(folder, "auto")


def stored_in(folder: Path) -> None:
    read_headers(find_shards(folder))


FILES: dict[str, Read] = {
    "config.json": read_config,
    "params.json": read_config,
    "tokenizer_config.json": read_text,
    "generation_config.json": read_text,
    "hf_quant_config.json": quantization_of,
    "modules.json": recipe_of,
    "config_sentence_transformers.json": recipe_of,
    "model.safetensors.index.json": stored_in,
    "pytorch_model.bin.index.json": stored_in,
}
OTHERS: dict[str, Read] = {
    "model.safetensors": stored_in,
    "model-00001.safetensors": stored_in,
    "pytorch_model.bin": stored_in,
    "tokenizer.json": read_text,
    "chat_template.jinja": load_template,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content",
    [DEEP, b"\xff", b"1" * 5000, rb'["\ud800"]', rb'{"\udcff": 1}'],
    ids=["deep", "no UTF-8", "long integer", "surrogate", "surrogate in a key"],
)
def test_broken_json_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name} is not JSON"):
        FILES[name](tmp_path)


def test_deep_special_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_bytes(DEEP)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    with pytest.raises(ModelError, match=r"special_tokens_map\.json is not JSON: it is nested too deeply"):
        load_template(tmp_path)


@pytest.mark.parametrize("name", FILES | OTHERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(tmp_path / name)
        case "device":
            (tmp_path / name).symlink_to("/dev/zero")
        case _:
            (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match=f"{name} should be a regular file"):
        (FILES | OTHERS)[name](tmp_path)


WHOLE = {name: read for name, read in (FILES | OTHERS).items() if name.endswith((".json", ".jinja"))}


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_are_read_as_a_whole_have_a_limit(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"{name}.* has more than {MOST_BYTES} bytes"):
        WHOLE[name](tmp_path)


def test_large_files_are_read(tmp_path: Path) -> None:
    """An index of 100,000 tensors, and a file as large as the largest tokenizers."""
    names = {
        f"model.layers.{n}.mlp.experts.{n}.down_proj.weight": "model-00001-of-00999.safetensors" for n in range(100_000)
    }
    file = tmp_path / "large.json"
    for content in ({"weight_map": names}, "x" * 40_000_000):
        file.write_text(json.dumps(content))
        assert read_json(file) == content


def test_pairs_of_surrogates_are_characters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(rb'{"\ud83d\ude00": "\u0041"}')
    assert read_config(tmp_path).values == {"\N{GRINNING FACE}": "A"}


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_the_configuration_of_a_fingerprint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="regular file"):
        configuration(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text('{"vocab_size": 7}')
    assert configuration(tmp_path) == b'{"vocab_size": 7}'


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nbaton: ready", "a\x9b"])
def test_names_of_tensors_are_printable(tmp_path: Path, name: str) -> None:
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="it holds a tensor named 'a") as refused:
        stored_in(tmp_path)
    assert str(refused.value).isprintable()


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"vocab_size": 7}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_config(tmp_path).integer("vocab_size") == 7


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (DEEP, "nested too deeply"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}', "does not describe tensors"),
    ],
    ids=["deep", "infinite"],
)
def test_headers_of_safetensors(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=message):
        stored_in(tmp_path)


def test_a_header_longer_than_safetensors_reads_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 41)
    with pytest.raises(ModelError, match="more than safetensors reads"):
        stored_in(tmp_path)


def test_integers_beyond_the_largest_float() -> None:
    config = ModelConfig({"eps": HUGE, "least": -HUGE, "time_step_limit": [0, HUGE]})
    with pytest.raises(ModelError, match="eps should be finite"):
        config.number("eps")
    with pytest.raises(ModelError, match="least should be finite"):
        config.number("least")
    with pytest.raises(ModelError, match="eps should be 1 finite"):
        ModelConfig({"eps": [HUGE]}).numbers("eps", 1)
    assert config.limits("time_step_limit") == (0, float("inf"))


@pytest.mark.parametrize("value", [[], {}, 3])
def test_a_model_type_is_a_text(value: Any) -> None:
    with pytest.raises(ModelError, match=r"model_type .* is not supported"):
        find_family(ModelConfig({"model_type": value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": None}, "config.json lacks chunk_size"),
        ({"vocab_size": []}, "vocab_size should be an integer"),
        ({"page_fold": 1}, "page_fold should be true or false"),
        ({"delay_ms": 3}, "delay_ms should be two numbers"),
        ({"delay_ms": [0, HUGE]}, "delay_ms should be two numbers"),
    ],
)
def test_the_hash_model_checks_its_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {"model_type": "hash", "vocab_size": 256, "chunk_size": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, None, torch.device("cpu"))


def test_a_default_prompt_is_a_name(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode": "mean"}, *KINDS)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"a": "b"}, "default_prompt_name": []}')
    with pytest.raises(ValueError, match="default_prompt_name"):
        read_recipe(tmp_path, "auto")


def test_a_kind_of_bitsandbytes_is_a_text(tmp_path: Path) -> None:
    values = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": []}
    with pytest.raises(ModelError, match="bnb_4bit_quant_type"):
        read_quantization(tmp_path, ModelConfig({"quantization_config": values}))


@pytest.mark.parametrize("layers", [MOST_LAYERS + 1, 1_000_000, 2**31 - 1])
def test_models_of_too_many_layers_are_refused_before_they_are_built(layers: int) -> None:
    with pytest.raises(ModelError, match=f"num_hidden_layers says {layers} layers: at most {MOST_LAYERS}"):
        find_family(ModelConfig({"model_type": "mamba2", "num_hidden_layers": layers}))
    if layers < 10_000:
        with pytest.raises(ModelError, match="layer_types says"):
            find_family(ModelConfig({"model_type": "mamba2", "layer_types": ["mamba"] * layers}))
