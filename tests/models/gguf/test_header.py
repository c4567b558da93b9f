"""Headers of GGUF files: what the `gguf` package writes is read, and a damaged file is refused."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from baton.models.config import ModelError
from baton.models.gguf.blocks import BLOCKS
from baton.models.gguf.header import read_gguf
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.checkpoint import load_model
from baton.models.loading.shards import MappedShards, find_shards, read_headers
from tests.models.gguf.converting import convert
from tests.models.oracle import Oracle

VALUES: dict[str, Any] = {
    "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -300, "uint32": 2**31, "int32": -(2**30), "float32": 0.5,
    "uint64": 2**40, "int64": -(2**40), "float64": 0.1, "bool": True, "string": "a é\n",
}  # fmt: skip
LISTS: dict[str, list[Any]] = {
    "texts": ["", "b", "ü"],
    "numbers": [1, 2, 3],
    "shares": [0.5, 1.5],
    "flags": [True, False],
}


def write(file: Path, **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(file, "mamba2")
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(f"of.{kind}", value)
    for name, values in LISTS.items():
        writer.add_array(f"of.{name}", values)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def sparse(file: Path, metadata: bytes = b"") -> Path:
    """Write a file that says it has 2**40 values and tensors, and that is a hole of 1 TiB after its beginning."""
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1 << 40) + metadata)
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    return file


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"", "names '' twice"),
        (struct.pack("<QIIQ", 0, 9, 0, 1 << 38), "does not describe tensors"),
        (struct.pack("<QIQ", 0, 8, 1 << 38), "does not describe tensors"),
    ],
    ids=["values", "array", "text"],
)
def test_sparse_files_take_neither_memory_nor_time(tmp_path: Path, metadata: bytes, message: str) -> None:
    file = sparse(tmp_path / "m.gguf", metadata)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        read_gguf(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones((2, 1, 5), np.float16)}
    file = write(tmp_path / "m.gguf", **tensors)
    metadata = read_gguf(file).metadata
    assert {kind: metadata[f"of.{kind}"] for kind in VALUES} == VALUES
    assert {name: list(metadata[f"of.{name}"]) for name in LISTS} == LISTS
    shards = MappedShards()
    found = {stored.name: shards.view(stored) for stored in read_headers([file])}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], torch.from_numpy(tensor))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_dequantized_as_the_gguf_package_does(name: str, tmp_path: Path) -> None:
    kind, chance = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    assert (elements, size) == (BLOCKS[name].elements, BLOCKS[name].bytes)
    raw = chance.integers(0, 256, (6, 4, size), dtype=np.uint8)
    at = 208 if name == "Q6_K" else 0  # where the scales of a block are
    raw[..., at : at + 2] = chance.uniform(-1, 1, (6, 4, 1)).astype(np.float16).view(np.uint8)
    raw[..., 2:4] = np.where(at, raw[..., 2:4], chance.uniform(-1, 1, (6, 4, 1)).astype(np.float16).view(np.uint8))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba2")
    writer.add_tensor("w", raw.reshape(6, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [stored] = read_headers([tmp_path / "m.gguf"])
    assert (stored.dtype, stored.shape) == (name, (6, 4 * elements))
    expected = gguf.quants.dequantize(raw.reshape(6, -1), kind)
    assert torch.equal(MappedShards().view(stored), torch.from_numpy(expected))


def test_other_formats_are_refused_by_name(oracle: Oracle, tmp_path: Path) -> None:
    def choose(name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.IQ4_NL if name == "blk.0.ssm_in.weight" else gguf.GGMLQuantizationType.F32

    folder, file = oracle.checkpoint("mamba2"), tmp_path / "m.gguf"
    original = gguf.quants.quantize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.quants, "quantize", lambda values, kind: original(values, gguf.GGMLQuantizationType.Q4_0))
        convert(folder, file, choose)
    with pytest.raises(ModelError, match=r"unsupported dtypes: blk\.0\.ssm_in\.weight \(IQ4_NL\)"):
        load_model(file, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: b"GGML" + data[4:], "is not a GGUF file"),
        (lambda data: data[:4] + (1).to_bytes(4, "little") + data[8:], "version 1"),
        (lambda data: data[:40], "is damaged"),
        (lambda data: data[:-8], "is cut short: it has"),
        (lambda data: data[:8] + b"\xff" * 16 + data[24:], "is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any, error: str) -> None:
    file = write(tmp_path / "m.gguf", a=np.ones((8, 8), np.float32))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=error):
        read_gguf(file)


def test_no_change_of_bytes_leads_to_another_error(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", a=np.ones((8, 8), np.float32))
    data, chance, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(data) - 256)] = chance.randrange(256)
        file.write_bytes(changed)
        try:
            read_gguf(file)
        except ModelError:
            refused += 1
    assert refused > 50


def test_all_parts_of_a_file_are_read(tmp_path: Path) -> None:
    for number, name in enumerate("ab", 1):
        write(tmp_path / f"m-{number:05}-of-00002.gguf", **{name: np.ones((2, 2), np.float32)})
    first, second = find_shards(tmp_path / "m-00001-of-00002.gguf")
    assert [stored.name for stored in read_headers([first, second])] == ["a", "b"]
    second.unlink()
    with pytest.raises(ModelError, match=r"lacks m-00002-of-00002\.gguf"):
        find_shards(first)


@pytest.mark.parametrize("alignment", [0, "32"])
def test_an_alignment_that_is_none_is_refused(tmp_path: Path, alignment: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba2")
    (writer.add_uint32 if alignment == 0 else writer.add_string)("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="is damaged"):
        read_gguf(tmp_path / "m.gguf")


def test_no_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no part of anything"):
        find_shards(tmp_path / "m-00001-of-00000.gguf")


def test_an_array_takes_as_much_memory_as_in_the_file(tmp_path: Path) -> None:
    file, count = tmp_path / "m.gguf", 4 << 20
    name = b"mamba2.numbers"
    begin = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    file.write_bytes(begin + struct.pack("<IIQ", 9, 0, count) + bytes(range(256)) * (count // 256) + bytes(32))
    tracemalloc.start()
    header = read_gguf(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * count
    with pytest.raises(ModelError, match="numbers has 4194304 entries"):
        Metadata("mamba2", header).value("numbers")
