"""The files with a checkpoint's weights: safetensors, or torch.save's files if there are none."""

import math
import mmap
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.kernels.linear.quantized import Groups
from baton.models.config import ModelError, is_file, parse_json, read_json
from baton.models.gguf.blocks import BLOCKS
from baton.models.gguf.header import SUFFIX, read_gguf
from baton.models.loading.pickled import read_pickled

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that tensors may have, by safetensors' names. Integers are parts of quantized weights."""
LFS_POINTER = b"version "
MOST_HEADER = 100_000_008  # bytes that safetensors reads as a header, with the 8 bytes of its length
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

with warnings.catch_warnings():
    # torch warns once per process about read-only memory, such as mapped files. Use up that warning here, unseen.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it. Its bytes are file[start:stop]."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # name of the dtype in safetensors, such as BF16, or of a block format in GGUF, such as Q4_K
    start: int = 0
    stop: int = 0

    def bytes_of(self, elements: int) -> int:
        """Return how many bytes so many elements have, on average."""
        return (self.stop - self.start) * elements // max(math.prod(self.shape), 1)

    def stored(self) -> tuple["StoredTensor", ...]:
        """Return the tensors of the files that have the values: this one, unless it is composed of others."""
        return (self,)


def find_shards(path: Path) -> list[Path]:
    """Return a checkpoint's safetensors files, or torch.save's files if there are none; of a GGUF file, all its parts.

    For each kind: the single file if there is one, else the files that an index names, else all files. As in
    transformers, the single file comes first, because an index may be left over from an older checkpoint.
    Raises ModelError if there are no files, or if files that the index names are missing.
    """
    if path.suffix == SUFFIX:
        return _parts_of(path)
    for stem, pattern in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        if is_file(path / stem):
            return [path / stem]
        index = path / f"{stem}.index.json"
        if is_file(index) and (files := _indexed(index)):
            return files
        if files := [file for file in sorted(path.glob(pattern)) if is_file(file)]:
            return files
    raise ModelError(f"{path} holds no safetensors files and no pytorch_model.bin, the only weights that are read")


def _parts_of(file: Path) -> list[Path]:
    """Return the files into which a GGUF file was split. Raises ModelError if one is missing."""
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    if int(part[3]) == 0:
        raise ModelError(f"{file.name} is no part of anything")
    files = [file.with_name(f"{part[1]}-{number:05}-of-{part[3]}{SUFFIX}") for number in range(1, int(part[3]) + 1)]
    if absent := [each.name for each in files if not each.is_file()]:
        raise ModelError(f"{file.parent} lacks {listed(absent)}")
    return files


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names. Raises ModelError if one is missing or outside of the index's folder."""
    content = read_json(index)
    try:
        names = set(content["weight_map"].values())
        files = sorted(index.parent / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} has no usable weight_map: {error!r}") from None
    outside = sorted(name for name in names if Path(name).is_absolute() or ".." in Path(name).parts)
    if outside:
        raise ModelError(f"{index} points outside its folder: {listed(outside)}")
    absent = [file.name for file in files if not is_file(file)]
    if absent:
        raise ModelError(f"{index.parent} lacks the shards {listed(absent)}")
    return files


def read_headers(files: Sequence[Path]) -> list[StoredTensor]:
    """Return the tensors of the files. Raises ModelError if a file is damaged, or if two contain the same name.

    Names with control characters or surrogates are refused: reports and error messages show names.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in READERS.get(file.suffix, _read_header)(file):
            if tensor.name in stored:
                raise ModelError(f"{stored[tensor.name].file} and {file} both hold {tensor.name}")
            if not tensor.name.isprintable():
                raise ModelError(f"{file} is damaged: it holds a tensor named {tensor.name!r}")
            stored[tensor.name] = tensor
    return list(stored.values())


def _read_pickled(file: Path) -> list[StoredTensor]:
    return [StoredTensor(file, name, t.shape, t.dtype, t.start, t.stop) for name, t in read_pickled(file).items()]


def _read_gguf(file: Path) -> list[StoredTensor]:
    return [StoredTensor(file, t.name, t.shape, t.dtype, t.start, t.stop) for t in read_gguf(file).tensors.values()]


def _read_header(file: Path) -> list[StoredTensor]:
    """Read a safetensors header. A file is: the length of the header in 8 bytes, the header in JSON, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        if first == LFS_POINTER:
            raise ModelError(f"{file} is a pointer of Git LFS instead of the weights: fetch them with git lfs pull")
        begin = 8 + int.from_bytes(first, "little")
        if begin > size:
            raise ModelError(f"{file} is damaged: it has {size} bytes, and its header should end at {begin}")
        if begin > MOST_HEADER:
            raise ModelError(f"{file} is damaged: its header has {begin - 8} bytes, more than safetensors reads")
        text = opened.read(begin - 8)
    header = parse_json(text, f"{file} is damaged: its header does not describe tensors")
    try:
        header.pop("__metadata__", None)
        tensors = [_stored(file, begin, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(f"{file} is damaged: its header does not describe tensors ({error!r})") from None
    end = max((tensor.stop for tensor in tensors), default=begin)
    if size < end:
        raise ModelError(f"{file} is cut short: it has {size} of {end} bytes")
    _check(file)
    return tensors


def _stored(file: Path, begin: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    start, stop = (begin + int(at) for at in entry["data_offsets"])
    return StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], start, stop)


def _check(file: Path) -> None:
    """Let safetensors check the header's dtypes, shapes and offsets. Raises ModelError if they are inconsistent."""
    try:
        # Use numpy: safetensors' torch backend maps the file writable, which fails for files larger than free memory.
        with safe_open(file, framework="np", device="cpu"):
            pass
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}") from None


READERS = {".bin": _read_pickled, SUFFIX: _read_gguf}
"""Readers of headers by a file's suffix; of all others safetensors'."""


class MappedShards:
    """Memory-mapped files: tensors are views of the page cache, which the system reads on access and can drop."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = Lock()

    def view(self, stored: StoredTensor) -> Tensor:
        """Return a tensor's values, usually as a view of the file. The caller must copy them before `release`.

        Block formats are dequantized to float32.
        """
        if stored.stop == stored.start:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        data = self._bytes(stored)
        if (block := BLOCKS.get(stored.dtype)) is not None:
            return block.dequantize(data).view(stored.shape)
        if stored.start % DTYPES[stored.dtype].itemsize:
            data = data.clone()  # torch refuses views at unaligned offsets.
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

    def groups(self, stored: StoredTensor, rows: slice) -> Groups:
        """Return the integers and scales of rows of a tensor in a block format. The tensor counts as [.., inputs]."""
        data = self._bytes(stored).view(math.prod(stored.shape[:-1]), -1)
        return BLOCKS[stored.dtype].groups(data[rows].flatten(), stored.shape[-1])

    def _bytes(self, stored: StoredTensor) -> Tensor:
        """Return a tensor's bytes, a view of the file."""
        size = stored.stop - stored.start
        return torch.frombuffer(self._map(stored.file), dtype=torch.uint8, count=size, offset=stored.start)

    def release(self, stored: StoredTensor) -> None:
        """Release a tensor's memory pages: they no longer count as this process's, but may stay in the page cache."""
        first = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
        if stored.stop > first:
            self._map(stored.file).madvise(mmap.MADV_DONTNEED, first, stored.stop - first)

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                with file.open("rb") as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[file]


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first `limit` names, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
