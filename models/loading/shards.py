"""The safetensors files of a checkpoint folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import ModelError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it. dtype: as safetensors calls it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_shards(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; ModelError if there are none, or some of an index are missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(path / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} has no usable weight_map: {error!r}") from None
        outside = sorted(name for name in names if Path(name).is_absolute() or ".." in Path(name).parts)
        if outside:
            raise ModelError(f"{index} points outside its folder: {listed(outside)}")
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{path} lacks the shards {listed(absent)}")
    if not files:
        raise ModelError(f"{path} holds no safetensors files, the only weights that are read")
    return files


def read_headers(files: list[Path]) -> list[StoredTensor]:
    """Every tensor of the files. ModelError for a damaged file, and for a name that two files hold."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with _opened(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if name in stored:
                    raise ModelError(f"{stored[name].file} and {file} both hold {name}")
                part = shard.get_slice(name)
                stored[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return list(stored.values())


def read_tensors(wanted: list[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """A file at a time, in the order of `wanted`."""
    for file in dict.fromkeys(tensor.file for tensor in wanted):
        with _opened(file) as shard:
            for tensor in wanted:
                if tensor.file == file:
                    yield tensor, shard.get_tensor(tensor.name)


def listed(names: list[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}") from None
