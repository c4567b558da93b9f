"""Headers of torch.save's files: a zip with each tensor's plain bytes, and a pickle that describes the tensors.

A pickle could run any code. Here it may build dictionaries and describe tensors; everything else is refused.
"""

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

from baton.models.config import ModelError
from baton.models.loading.pickle_scan import check_pickle

STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
LOCAL_HEADER = 30
"""Bytes of a zip member's header before its name. The last four are the lengths of the name and the extra field."""


@dataclass(frozen=True)
class Storage:
    """The bytes file[start:stop], which hold one tensor or several."""

    dtype: str  # name of the dtype in safetensors, such as BF16
    start: int
    stop: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in row-major order, whose bytes are file[start:stop]."""

    shape: tuple[int, ...]
    dtype: str  # name of the dtype in safetensors, such as BF16
    start: int
    stop: int


def read_pickled(file: Path) -> dict[str, PickledTensor]:
    """Return the tensors of a state dict by name. Raises ModelError for any other content, and for a damaged file."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as plain:
            places = dict(_places(archive, plain))
            described = next((name for name in places if name.endswith("/data.pkl")), None)
            if described is None:
                raise ModelError(f"{file} is not a file of torch.save: it holds no uncompressed data.pkl")
            folder = described.removesuffix("data.pkl")
            if f"{folder}byteorder" in places and archive.read(f"{folder}byteorder") != b"little":
                raise ModelError(f"{file}: its byteorder is not supported: it should be little")
            storages = {name.removeprefix(f"{folder}data/"): place for name, place in places.items()}
            data = archive.read(described)
            check_pickle(data)
            found = Description(BytesIO(data), storages).load()
    except zipfile.BadZipFile as error:
        raise ModelError(f"{file} is damaged, or was written by a PyTorch before 1.6: {error}") from None
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RuntimeError,  # also NotImplementedError and RecursionError: encrypted members, later versions of zip
        TypeError,
        ValueError,
    ) as error:
        raise ModelError(f"{file} does not describe plain tensors: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{file} should hold a dictionary of tensors by name")
    others = [str(name) for name, tensor in found.items() if not isinstance(tensor, PickledTensor)]
    if others:
        raise ModelError(f"{file} should hold tensors only; these are not: {', '.join(others[:5])}")
    return {str(name): tensor for name, tensor in found.items()}


def _places(archive: zipfile.ZipFile, plain: IO[bytes]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (start, stop)) for each uncompressed member of the zip: its bytes are file[start:stop]."""
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
    """A reader of pickles that accepts descriptions of tensors only.

    storages: (start, stop) in the file for each storage, by its key.
    """

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
        if not isinstance(kind, str) or not isinstance(name, str):
            raise pickle.UnpicklingError("it asks for something without a name")
        if kind != "storage" or name not in STORAGES:
            raise pickle.UnpicklingError(f"it asks for {kind} {name}")
        return Storage(STORAGES[name], *self._storages[key])


def tensor_of(storage: Storage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: object) -> PickledTensor:
    """Describe a tensor, in place of torch._utils._rebuild_tensor_v2. offset and stride count elements."""
    if not all(type(number) is int for number in (offset, *shape, *stride)):
        raise ValueError("a tensor's offset, shape and strides should be integers")
    size = SIZES[storage.dtype]
    start = storage.start + offset * size
    stop = start + math.prod(shape) * size
    if offset < 0 or min(shape, default=1) < 0 or stop > storage.stop:
        raise ValueError(f"a tensor of shape {list(shape)} does not fit into its storage")
    row_major = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if any(n > 1 and step != plain for n, step, plain in zip(shape, stride, row_major, strict=True)):
        raise ValueError(f"a tensor of shape {list(shape)} has strides {list(stride)}: it should be contiguous")
    return PickledTensor(tuple(shape), storage.dtype, start, stop)


def parameter_of(tensor: PickledTensor, *_: object) -> PickledTensor:
    """Describe a parameter, in place of torch._utils._rebuild_parameter."""
    return tensor
