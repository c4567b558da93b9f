"""`baton inspect` reports what loading would find, without loading."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from baton.actors.forward.streams import CpuStream
from baton.actors.runtime.sizing import count_active_parameters, count_parameters, weight_bytes
from baton.api import cli
from baton.api.config import Config
from baton.api.inspection import AS_IN_FILE, Inspection, examine, inspect, lines
from baton.api.machine import memory
from baton.api.machine.batch import batch_limits
from baton.api.serve import StartError
from baton.api.terminal.console import complain
from baton.api.wiring import load, model_length, size
from baton.models.config import read_config
from baton.models.families import granitemoehybrid
from baton.models.loading.checkpoint import load_model
from baton.models.loading.shards import MappedShards
from tests.models.configurations.nemotron_h import PUBLISHED
from tests.models.loading.formats.writing import WAYS, quantize as write_quantized
from tests.models.loading.test_fp8 import FORMATS, quantize
from tests.models.loading.test_loading import copied
from tests.models.oracle import Oracle
from tests.models.test_bundled import BUNDLED

CPU = torch.device("cpu")


def look(path: Path, **options: Any) -> Inspection:
    return examine(Config(model=str(path), **options))


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(MappedShards, "view", refuse)


def test_it_reports_what_loading_finds() -> None:
    found = look(BUNDLED)
    loaded = {
        "float32": (torch.float32, None),
        "bfloat16": (torch.bfloat16, None),
        "int8": (None, 8),
        "int4": (None, 4),
    }
    models = {name: load_model(BUNDLED, dtype, CPU, bits=bits) for name, (dtype, bits) in loaded.items()}
    assert found.weights_in_memory == {name: weight_bytes(model) for name, model in models.items()}
    model = models["float32"]
    assert (found.parameters, found.loaded_as) == (count_parameters(model), "float32")
    assert found.state == sum(spec.nbytes for spec in model.state_specs())
    assert found.thousand_tokens == 1000 * sum(spec.nbytes for spec in model.kv_specs())
    assert (found.vocabulary, found.positions) == (model.vocab_size, model.max_position)
    assert isinstance(model, nn.Module)
    assert found.weights_on_disk == {"F32": sum(tensor.nbytes for tensor in model.state_dict().values())}
    assert (found.tokenizer, found.chat_template, found.missing, found.refused) == (True, True, [], [])


@pytest.mark.parametrize("name", ["nemotron_h-moe-latent", "qwen3_5_moe", "kimi_linear-moe"])
def test_it_reports_the_memory_of_experts(oracle: Oracle, name: str) -> None:
    path = oracle.checkpoint(name)
    found = look(path)
    models = {bits: load_model(path, None, CPU, bits=int(bits[3:])) for bits in ("int8", "int4")}
    assert {bits: found.weights_in_memory[bits] for bits in models} == {n: weight_bytes(m) for n, m in models.items()}
    active = count_active_parameters(load_model(path, None, CPU))
    assert found.parameters is not None and found.active_parameters == active < found.parameters
    assert found.refused == []


@pytest.mark.usefixtures("nothing_is_read")
def test_layers_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["NVIDIA-Nemotron-Nano-9B-v2"].config))
    found = look(tmp_path, memory=2**34)
    assert (found.family, found.parameters) == ("nemotron_h", 8888227328)
    assert found.layers == {"Mamba2Mixer": 27, "SquaredReluMLP": 25, "Attention": 4}
    assert (found.missing, found.refused, found.files) == (["weights", "tokenizer"], [], 0)


@pytest.mark.usefixtures("nothing_is_read")
def test_the_pools_are_the_servers() -> None:
    config = Config(model=str(BUNDLED), memory=2**26, max_running=40, page_size=32)
    with torch.device("meta"):
        model = granitemoehybrid.FAMILY.build(read_config(BUNDLED), torch.float32, torch.float32)
    length = model_length(config, model)
    sizes = size(config, batch_limits(config, False, 0), model, length, CpuStream())
    room = examine(config).room
    assert room is not None
    assert (room.pools, room.slots, room.pages, room.running) == (2**26, sizes.slots, sizes.pages, sizes.max_running)
    assert room.contexts == sizes.pages * 32 / length
    assert room.most_running == sizes.slots  # The slots suffice for running requests only, not for cached states.


@pytest.mark.usefixtures("nothing_is_read")
def test_every_reason_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "copy"
    shutil.copytree(BUNDLED, path)
    values = json.loads((path / "config.json").read_text())
    values.update(hidden_act="gelu", quantization_config={"quant_method": "hqq"})
    (path / "config.json").write_text(json.dumps(values))
    (path / "tokenizer.json").write_text("{")
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert cli.main(["inspect", str(path), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    for reason in (
        "is cut short",
        "not a tokenizer",
        "'hqq' is not supported",
        "hidden_act = 'gelu' is not supported",
    ):
        assert [reason in message for message in refused].count(True) == 1, reason
    assert len(refused) == 4


@pytest.mark.usefixtures("nothing_is_read")
def test_tensors_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    path = copied(BUNDLED, tmp_path / "copy", config=lambda values: values.update(shared_intermediate_size=64))
    [reason] = look(path).refused
    assert "wrong shapes" in reason and "shared_mlp" in reason


def test_the_memory_of_fp8_weights(tmp_path: Path) -> None:
    path = copied(BUNDLED, tmp_path / "copy")
    quantize(path, FORMATS["fp8 by block"])
    found, plain = look(path), look(BUNDLED)
    assert (found.quantization, found.refused) == ("fp8", [])
    assert found.quantized == {"FP8": 38} and found.unquantized == {"model.embed_tokens.weight": 1}
    assert found.weights_in_memory == plain.weights_in_memory
    assert set(found.weights_on_disk) == {"F32", "F8_E4M3", "BF16"}
    assert sum(found.weights_on_disk.values()) < 0.5 * sum(plain.weights_on_disk.values())


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("way", "method", "quantized", "loaded_as"),
    [
        ("awq", "awq", {"AWQ int4": 33}, AS_IN_FILE),
        ("gptq, 8 bits", "gptq", {"GPTQ int8": 33}, "float32"),
        ("packed, 8 bits", "compressed-tensors", {"int8": 38}, AS_IN_FILE),
        ("nvfp4 of modelopt", "modelopt", {"NVFP4": 38}, "float32"),
        ("mxfp4 of compressed-tensors", "compressed-tensors", {"MXFP4": 38}, "float32"),
        ("nf4, nested", "bitsandbytes", {"NF4": 38}, "float32"),
    ],
)
def test_quantized_weights_are_counted_by_format(
    tmp_path: Path, way: str, method: str, quantized: dict[str, int], loaded_as: str
) -> None:
    path = copied(BUNDLED, tmp_path / "copy")
    write_quantized(path, WAYS[way])
    found, plain = look(path), look(BUNDLED)
    assert (found.quantization, found.quantized, found.refused) == (method, quantized, [])
    assert found.unquantized["model.embed_tokens.weight"] == 1
    assert sum(found.unquantized.values()) + sum(quantized.values()) == 39
    assert (found.loaded_as, found.parameters) == (loaded_as, plain.parameters)
    text = dict(lines(found))
    assert text["quantization"].startswith(f"{method}: {sum(quantized.values())} {next(iter(quantized))} weights, ")
    assert "1 model.embed_tokens.weight" in text["not quantized"]


def test_integers_of_the_files_need_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(BUNDLED, tmp_path / "copy")
    write_quantized(path, WAYS["awq"])
    config = Config(model=str(path), memory=2**24, host_memory=0)
    size = examine(config).weights_in_memory
    monkeypatch.setattr(memory, "free_memory", lambda device: (size["float32"] + size[AS_IN_FILE]) // 2)
    with pytest.raises(StartError, match="the weights take "):
        load(replace(config, kernels="torch"), lambda done, total: None)
    load(config, lambda done, total: None)
    assert not any(reason.startswith("the weights take ") for reason in examine(config).refused)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memory": 2**17}, "no request fits"),
        ({"max_model_len": 10**6}, "--max-model-len: the model has only 8192 positions"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    found = look(BUNDLED, **options)
    assert found.room is None
    [message] = found.refused
    assert message.startswith(reason)


@pytest.mark.parametrize("name", ["granite\x1b[2J", "granite\nbaton: ready", "granite\x9b"])
def test_names_of_a_checkpoint_are_shown_with_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mamba2", "architectures": [f"{name}Bidirectional"]})
    )
    for command in ("inspect", "serve"):
        shown = lines_of(command, tmp_path, capsys)
        assert any("granite\\" in line and "is bidirectional" in line for line in shown)
        assert all(line.isprintable() and not line.startswith("baton: ready") for line in shown)


def lines_of(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a command prints about a folder."""
    if command == "inspect":
        assert inspect(Config(model=str(folder)), as_json=False) == 1
    else:
        with pytest.raises(StartError) as refused:
            load(Config(model=str(folder), device="cpu"), lambda done, total: None)
        complain(refused.value)
    return [line for line in "".join(capsys.readouterr()).split("\n") if "event" not in line]


def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a folder with a checkpoint" in capsys.readouterr().out


def test_other_formats_of_weights_are_refused_not_missing(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "config.json", tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    found = look(tmp_path)
    assert found.missing == []
    assert [reason for reason in found.refused if "holds no safetensors files" in reason]


def test_an_index_alone_lacks_its_weights(tmp_path: Path) -> None:
    """`hf download --include "*.json"` leaves such a folder: an index of the weights, without the weights."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUNDLED / name, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    found = look(tmp_path)
    assert (found.missing, found.refused) == (["weights"], [])
    (tmp_path / "1.safetensors").write_bytes(b"")
    assert any("lacks the shards 2.safetensors" in reason for reason in look(tmp_path).refused)


@pytest.mark.usefixtures("nothing_is_read")
def test_weights_without_a_tokenizer_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = copied(BUNDLED, tmp_path / "copy")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink(missing_ok=True)
    [reason] = look(path).refused
    assert "tokenizer.json" in reason
    with pytest.raises(StartError, match=re.escape(reason)):
        load(Config(model=str(path)), lambda done, total: None)


@pytest.mark.parametrize(
    ("quantize", "free", "fits"), [("none", 2**23, False), ("int8", 2**23, True), ("int8", 2**20, False)]
)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, quantize: Literal["none", "int8"], free: int, fits: bool
) -> None:
    read: list[str] = []
    view = MappedShards.view
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    monkeypatch.setattr(MappedShards, "view", lambda shards, stored: read.append(stored.name) or view(shards, stored))
    config = Config(model=str(BUNDLED), quantize=quantize, memory=2**24, host_memory=0)
    refused = [reason for reason in examine(config).refused if reason.startswith("the weights take ")]
    assert (refused == []) == fits and not read
    if fits:
        load(config, lambda done, total: None)
        assert read
        return
    with pytest.raises(StartError, match=re.escape(refused[0])):
        load(config, lambda done, total: None)
    assert not read


def test_weights_keep_the_dtype_of_the_files_if_none_is_named(oracle: Oracle, tmp_path: Path) -> None:
    def unname(values: dict[str, Any]) -> None:
        del values["dtype"]

    def narrow(tensors: dict[str, Any]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items() if "A_log" not in name})

    plain = copied(oracle.checkpoint("mamba2"), tmp_path / "plain", config=unname)
    narrowed = copied(plain, tmp_path / "narrowed", tensors=narrow)
    scaled = copied(narrowed, tmp_path / "scaled")
    quantize(scaled, FORMATS["compressed"])
    for path, dtype in ((plain, torch.float32), (narrowed, torch.bfloat16), (scaled, torch.bfloat16)):
        model = load_model(path, None, CPU)
        assert isinstance(model, nn.Module)
        assert model.get_parameter("backbone.layers.0.mixer.in_proj.weight").dtype == dtype
        assert look(path).loaded_as == str(dtype).removeprefix("torch.")


def test_the_text_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(BUNDLED), "--quantize", "int8"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"] == "granitemoehybrid"
    assert lines["layers"] == "5 Mamba2Mixer, 8 GatedMLP, 3 Attention"
    assert lines["parameters"] == "2,727,194"
    assert "loaded as int8" in lines["in"] and "10.4 MiB F32; 1 file" in lines["on"]
    assert (lines["tokenizer"], lines["refused"]) == ("with a chat template", "nothing")
