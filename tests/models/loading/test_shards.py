"""Weight files: damage, which file has which tensor, and the memory that reading takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from baton.models.config import ModelError
from baton.models.loading.checkpoint import random_model
from baton.models.loading.fingerprint import fingerprint
from baton.models.loading.shards import MappedShards, read_headers
from tests.models.loading.test_loading import assert_loads_alike, copied, load
from tests.models.oracle import Oracle

CPU = torch.device("cpu")
Damage = Callable[[bytes], bytes]


def header_of(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def with_header(header: bytes, tensors: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def lie_about_a_shape(data: bytes) -> bytes:
    header, tensors = header_of(data)
    return with_header(header.replace(b'"shape":[64]', b'"shape":[65]', 1), tensors)


def forget_offsets(data: bytes) -> bytes:
    header, tensors = header_of(data)
    return with_header(header.replace(b"data_offsets", b"data_0ffsets", 1), tensors)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], r"model\.safetensors is cut short: it has \d+ of \d+ bytes"),
        (
            lambda data: data[:1000],
            r"model\.safetensors is damaged: it has 1000 bytes, and its header should end",
        ),
        (lambda data: b"", r"model\.safetensors is damaged: it has 0 bytes"),
        (lambda data: data + b"more", r"model\.safetensors is damaged"),
        (lambda data: with_header(b"{", header_of(data)[1]), r"damaged: its header does not describe tensors"),
        (lambda data: with_header(b"[]", header_of(data)[1]), r"damaged: its header does not describe tensors"),
        (forget_offsets, r"damaged: its header does not describe tensors \(KeyError\('data_offsets'\)\)"),
        (lie_about_a_shape, r"model\.safetensors is damaged"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", r"a pointer of Git LFS"),
    ],
)
def test_damaged_files_are_named(oracle: Oracle, tmp_path: Path, damage: Damage, message: str) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy")
    shard = path / "model.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_tensors_may_lie_at_any_byte(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("mamba2")
    path = copied(original, tmp_path / "copy")
    shard = path / "model.safetensors"
    header, tensors = header_of(shard.read_bytes())
    shard.write_bytes(with_header(header.rstrip() + b" " * ((3 - len(header.rstrip())) % 8), tensors))
    assert all(tensor.start % 2 == 1 for tensor in read_headers([shard]))
    assert_loads_alike(path, original)


def test_mapped_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.randn(3, 700).to(dtype) for dtype in dtypes} | {"none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = MappedShards()
    for stored in read_headers([tmp_path / "model.safetensors"]):
        assert torch.equal(shards.view(stored).double(), tensors[stored.name].double())
        shards.release(stored)
        assert torch.equal(shards.view(stored).double(), tensors[stored.name].double())


def test_files_are_mapped_read_only(oracle: Oracle) -> None:
    """A writable mapping would count as used memory, and a file may be larger than the memory."""
    shards, file = MappedShards(), oracle.checkpoint("mamba2") / "model.safetensors"
    views = [shards.view(stored) for stored in read_headers([file])]
    modes = {line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))}
    assert views and modes == {"r--s"}


def test_leftover_files_of_an_older_checkpoint_are_not_read(oracle: Oracle, tmp_path: Path) -> None:
    """As in transformers, a single file comes before an index of shards, and these before torch.save's files."""
    original = oracle.checkpoint("mamba2")
    whole = copied(original, tmp_path / "whole")
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    shards = copied(oracle.checkpoint("mamba2", max_shard_size="40KB"), tmp_path / "shards")
    for path in (whole, shards):
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
        assert_loads_alike(path, original)
    (shards / "model.safetensors.index.json").unlink()
    assert_loads_alike(shards, original)


def test_weights_that_differ_anywhere_have_another_fingerprint(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("mamba2")
    known = fingerprint(original)
    assert fingerprint(copied(original, tmp_path / "copy")) == known != fingerprint(original, 1)
    weights = load_file(original / "model.safetensors")
    path = copied(original, tmp_path / "trained")
    for name, weight in weights.items():
        save_file({**weights, name: weight * 1.01}, path / "model.safetensors")
        assert fingerprint(path) != known, name
    assert fingerprint(copied(original, tmp_path / "other", config=lambda c: c.update(chunk_size=8))) != known


WAYS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("float32", 8)}
SLACK = 40 * 2**20
"""Bytes that loading may need in addition to the result and the largest tensor. Integers take most of them: the
largest tensor's integers are put together from parts.
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of 150 MB in float32, half of it in its largest tensor."""
    path = tmp_path_factory.mktemp("large")
    config = {"model_type": "mamba2", "hidden_size": 512, "num_heads": 16, "head_dim": 64, "num_hidden_layers": 12}
    config |= {"n_groups": 1, "vocab_size": 32768, "state_size": 64, "tie_word_embeddings": True}
    model = random_model(config, torch.float32, CPU, seed=0)
    assert isinstance(model, nn.Module)
    (path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), path / "model.safetensors")
    return path


def test_loading_needs_memory_for_the_result_and_one_tensor(large: Path) -> None:
    """Pages of mapped files count as memory, too."""
    script = [sys.executable, "-m", "tests.models.loading.peak_memory", str(large), json.dumps(WAYS)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    largest = max(tensor.nbytes for tensor in load_file(large / "model.safetensors").values())
    over = {name: sizes["peak"] - sizes["result"] - largest for name, sizes in found.items()}
    assert {name: size for name, size in over.items() if size > SLACK} == {}, over
