"""Headers of what torch.save writes: a zip with each tensor's plain bytes, and a pickle that says what they are.

Nothing of what such a pickle could run is run: it may make dictionaries and describe tensors, all else is refused.
"""

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

from baton.models.config import ModelError

STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
LOCAL_HEADER = 30
"""Bytes before a member's name in a zip; the last four are the lengths of that name and of what follows it."""


@dataclass(frozen=True)
class Storage:
    """A tensor's bytes, or several tensors': file[start:stop]."""

    dtype: str
    start: int
    stop: int


@dataclass(frozen=True)
class PickledTensor:
    """Of a storage, `shape` in row-major order from byte `start` of the file on."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


def read_pickled(file: Path) -> dict[str, PickledTensor]:
    """The tensors of a state dict by name. ModelError for anything else, and for a file that is damaged."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as plain:
            places = dict(_places(archive, plain))
            described = next((name for name in places if name.endswith("/data.pkl")), None)
            if described is None:
                raise ModelError(f"{file} is not what torch.save writes: it holds no plain data.pkl")
            folder = described.removesuffix("data.pkl")
            if f"{folder}byteorder" in places and archive.read(f"{folder}byteorder") != b"little":
                raise ModelError(f"{file} has its numbers in an order of bytes that is not supported")
            storages = {name.removeprefix(f"{folder}data/"): place for name, place in places.items()}
            found = Description(archive.open(described), storages).load()
    except zipfile.BadZipFile as error:
        raise ModelError(f"{file} is damaged, or of a PyTorch before 1.6: {error}") from None
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelError(f"{file} does not describe plain tensors: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{file} holds no tensors by name")
    others = [str(name) for name, tensor in found.items() if not isinstance(tensor, PickledTensor)]
    if others:
        raise ModelError(f"{file} holds what is no tensor: {', '.join(others[:5])}")
    return {str(name): tensor for name, tensor in found.items()}


def _places(archive: zipfile.ZipFile, plain: IO[bytes]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, beginning and end in the file of each member that lies in it as it is."""
    length = plain.seek(0, SEEK_END)
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            continue
        plain.seek(info.header_offset)
        header = plain.read(LOCAL_HEADER).ljust(LOCAL_HEADER, b"\0")
        start = info.header_offset + LOCAL_HEADER + sum(struct.unpack_from("<HH", header, LOCAL_HEADER - 4))
        if start + info.file_size > length:
            raise zipfile.BadZipFile(f"{info.filename} should end at {start + info.file_size} of {length} bytes")
        yield info.filename, (start, start + info.file_size)


class Description(pickle.Unpickler):
    """Reads a pickle in which nothing but tensors in `storages`, by key their places in the file, may be described."""

    def __init__(self, stream: IO[bytes], storages: dict[str, tuple[int, int]]) -> None:
        super().__init__(stream)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return tensor_of
            case "torch._utils", "_rebuild_parameter":
                return parameter_of
            case "torch", _ if name in STORAGES:
                return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Storage:
        kind, name, key, _, _ = pid
        if kind != "storage" or name not in STORAGES:
            raise pickle.UnpicklingError(f"it asks for {kind} {name}")
        return Storage(STORAGES[name], *self._storages[key])


def tensor_of(storage: Storage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: object) -> PickledTensor:
    """In the place of torch's function of these arguments. offset and stride count elements."""
    size = SIZES[storage.dtype]
    start = storage.start + offset * size
    stop = start + math.prod(shape) * size
    if offset < 0 or min(shape, default=1) < 0 or stop > storage.stop:
        raise ValueError(f"a tensor of shape {list(shape)} does not fit into its storage")
    plain = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if any(n > 1 and step != wanted for n, step, wanted in zip(shape, stride, plain, strict=True)):
        raise ValueError(f"a tensor of shape {list(shape)} has strides {list(stride)}: only plain ones are read")
    return PickledTensor(tuple(shape), storage.dtype, start, stop)


def parameter_of(tensor: PickledTensor, *_: object) -> PickledTensor:
    """In the place of torch's function of these arguments."""
    return tensor
