"""Pickles that would crash Python's reader or fill memory are refused before they are read."""

import io
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from baton.models.config import ModelError
from baton.models.loading.pickle_scan import check_pickle
from baton.models.loading.shards import read_headers

START = b"\x80\x02}"  # protocol 2, and an empty dictionary
FLAGS, VERSION = 6, 4  # offsets of these fields in the header of a zip member; 2 more in the directory


def write(file: Path, data: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)


def memo(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (START + b")" + b"\x85" * 200_000 + b"Ns.", "a tuple of more than"),
        (START + b")" + b"\x85q\x00h\x00" * 2000 + b"Ns.", "a tuple of more than"),
        (START + b")" + b"2\x86" * 60 + b"Ns.", "a tuple of more than"),  # each tuple holds the last one twice
        (START + b"(" + b"N" * 2000 + b"tNs.", "a tuple of more than"),
        (START + memo(2**28) + b".", "in LONG_BINPUT"),
        (START + memo(2**32 - 1) + b".", "in LONG_BINPUT"),
        (b"\x80\x02}p268435456\n.", "in PUT"),
        (START + b"B" + struct.pack("<I", 2**31) + b".", "does not describe plain tensors"),
        (START + b"\x8e" + struct.pack("<Q", 2**40) + b".", "does not describe plain tensors"),
        (START + b"\x96" + struct.pack("<Q", 2**40) + b".", "does not describe plain tensors"),
        (START + b"\x95" + struct.pack("<Q", 2**40) + b".", "in FRAME"),
        (b"\x80\x02t.", "a value that is not there"),
        (b"\x80\x02q\x00.", "a value that is not there"),
    ],
)
def test_hostile_pickles_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    write(tmp_path / "pytorch_model.bin", data)
    with pytest.raises(ModelError, match=message):
        read_headers([tmp_path / "pytorch_model.bin"])


@pytest.mark.parametrize("shape", ["[0] * 3", "'a'", "1.5"])
def test_shapes_are_integers(tmp_path: Path, shape: str) -> None:
    saved = io.BytesIO()
    torch.save({"a": torch.ones(2)}, saved)
    with zipfile.ZipFile(saved) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            code = {"[0] * 3": b"]", "'a'": b"X\x01\x00\x00\x00a", "1.5": b"G" + struct.pack(">d", 1.5)}[shape]
            archive.writestr(name, data.replace(b"K\x02\x85", code + b"\x85"))
    with pytest.raises(ModelError, match="should be integers"):
        read_headers([file])


@pytest.mark.parametrize(("field", "value"), [(FLAGS, 1), (FLAGS, 1 << 5), (FLAGS, 1 << 6), (VERSION, 99)])
def test_zips_that_python_cannot_read_are_refused(tmp_path: Path, field: int, value: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    write(file, pickle.dumps({}, 2))
    data = bytearray(file.read_bytes())
    for signature, shift in ((b"PK\x01\x02", 2), (b"PK\x03\x04", 0)):
        struct.pack_into("<H", data, data.index(signature) + shift + field, value)
    file.write_bytes(data)
    with pytest.raises(ModelError, match="pytorch_model"):
        read_headers([file])


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles_of_every_protocol_pass(protocol: int) -> None:
    values = {
        "a": (1, 2, (3, [4.5, None])),
        "b": {"c": {1, 2}, "d": frozenset({"x"})},
        "e": b"x" * 300,
        "f": ("g",) * 9,
    }
    check_pickle(pickle.dumps(values, protocol))
