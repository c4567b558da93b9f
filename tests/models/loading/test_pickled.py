"""Weights in torch.save's files: they are read without running code, and refused unless they are plain tensors."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.models.config import ModelError
from baton.models.loading.fingerprint import fingerprint
from baton.models.loading.shards import MappedShards, read_headers
from tests.models.loading.test_loading import assert_loads_alike, copied, load, rename_like_codestral, state_spaces
from tests.models.oracle import Oracle

PLAIN = {
    "half": torch.arange(12.0).view(3, 4).half(),
    "bfloat16": torch.arange(5.0).bfloat16(),
    "double": torch.arange(4.0, dtype=torch.float64).view(2, 1, 2),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "part": torch.arange(10.0)[3:7],
    "column": torch.arange(6.0).view(1, 6).t(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def test_tensors_are_as_they_were_saved(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    state: OrderedDict[str, Any] = OrderedDict(PLAIN, again=PLAIN["half"])
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    torch.save(state, file)
    shards = MappedShards()
    found = {stored.name: shards.view(stored) for stored in read_headers([file])}
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach())


@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoints_of_state_spaces(oracle: Oracle, tmp_path: Path, shards: int) -> None:
    """Checkpoints of state-spaces have their own names and config, and a head that shares the embedding's storage."""
    original = oracle.checkpoint("mamba2")
    path = copied(original, tmp_path / "native", config=state_spaces, tensors=rename_like_codestral)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights["model.backbone.embedding.weight"]
    files = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(weights)} if shards > 1 else {}
    for file in set(files.values()) or {"pytorch_model.bin"}:
        torch.save({n: w for n, w in weights.items() if files.get(n, file) == file}, path / file)
    if files:
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_loads_alike(path, original)
    before = fingerprint(path)
    weights["model.backbone.norm_f.weight"][0] += 1
    torch.save(weights, path / sorted(path.glob("*.bin"))[0].name)
    assert fingerprint(path) != before


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def compress(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def run(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            members = {each: archive.read(each) for each in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for each, data in members.items():
                archive.writestr(each, change(data) if each.endswith(name) else data)

    return run


def other_storage(data: bytes) -> bytes:
    key = b"X\x01\x00\x00\x00"
    return data.replace(key + b"0", key + b"7")


@pytest.mark.parametrize(
    ("saved", "change", "message"),
    [
        ({"a": Malicious()}, None, r"does not describe plain tensors: it asks for (posix|nt)\.mkdir"),
        (Malicious(), None, "it asks for"),
        ({"a": torch.ones(2, 3).t()}, None, r"shape \[3, 2\] has strides \[1, 3\]: it should be contiguous"),
        ({"a": torch.ones(2, dtype=torch.int64)}, None, r"it asks for torch\.LongStorage"),
        ({"a": torch.ones(2).to_sparse()}, None, "it asks for torch._utils._rebuild_sparse_tensor"),
        ({"state_dict": {"a": torch.ones(2)}}, None, "tensors only; these are not: state_dict"),
        ({}, None, "should hold a dictionary of tensors by name"),
        ([torch.ones(2)], None, "should hold a dictionary of tensors by name"),
        ({"a": torch.ones(2)}, compress, "holds no uncompressed data.pkl"),
        (
            {"a": torch.ones(2)},
            lambda file: file.write_bytes(file.read_bytes()[:300]),
            "damaged, or was written by a PyTorch before",
        ),
        (
            {"a": torch.ones(2)},
            lambda file: file.write_bytes(pickle.dumps({})),
            "damaged, or was written by a PyTorch before",
        ),
        ({"a": torch.ones(2)}, rewrite("byteorder", lambda data: b"big"), "byteorder is not supported"),
        ({"a": torch.ones(2)}, rewrite("data/0", lambda data: data[:-1]), "does not fit into its storage"),
        ({"a": torch.ones(2)}, rewrite("data.pkl", lambda data: data[:30]), "does not describe plain tensors"),
        ({"a": torch.ones(2)}, rewrite("data.pkl", other_storage), "does not describe plain tensors: '7'"),
    ],
)
def test_other_pickles_are_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Any, change: Callable[[Path], None] | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(saved, file)
    if change:
        change(file)
    with pytest.raises(ModelError, match=message):
        read_headers([file])
    assert not (tmp_path / "harm").exists()


def test_safetensors_come_first(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "both")
    (path / "pytorch_model.bin").write_bytes(b"damaged")
    load(path)
