"""Weights that several stored tensors compose, such as integers and their scales."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.quantized import Form, Groups
from baton.models.config import ModelError
from baton.models.loading.shards import StoredTensor

ROWS_AT_ONCE = 128
FLOATS = ("F64", "F32", "F16", "BF16")
Read = Callable[[StoredTensor], Tensor]
"""Function that returns a stored tensor's values."""
Pool = Mapping[str, StoredTensor]
"""The tensors of a checkpoint by their names."""


class Misfit(ModelError):
    """A weight with a missing or unsuitable companion tensor."""


class MixedGroups(Exception):
    """Integers cannot stay integers: the numbers of a group do not stay together, or have no form in memory."""


@dataclass(frozen=True, kw_only=True)
class Composed(StoredTensor):
    """A weight that several stored tensors compose. `dtype` is the name of its format."""

    sources: tuple[StoredTensor, ...]
    form: Form | None = None  # of its integers in memory; None: only the values can be read
    has_shape: bool = True  # whether headers state the shape; if not, `shape` is [elements] until the model shows it

    def stored(self) -> tuple[StoredTensor, ...]:
        return self.sources

    def values(self, read: Read, dtype: torch.dtype) -> Tensor:
        """Return the values, computed in float32 and rounded to `dtype`."""
        raise NotImplementedError

    def groups(self, read: Read) -> Groups:
        """Return the integers and scales in `form`. Raises MixedGroups if the values of the tensors forbid it."""
        raise NotImplementedError


def companion(pool: Pool, weight: StoredTensor, name: str, dtypes: Sequence[str]) -> StoredTensor:
    """Return the tensor `name` that belongs to a weight. Raises Misfit if it is missing or of another dtype."""
    if name not in pool:
        raise Misfit(f"{weight.name} has no {name.rpartition('.')[2]}: {name} is missing")
    if pool[name].dtype not in dtypes:
        raise Misfit(f"{name} has the dtype {pool[name].dtype}, not {' or '.join(dtypes)}")
    return pool[name]


def check_shape(tensor: StoredTensor, *shapes: tuple[int, ...]) -> None:
    """Raise Misfit unless a tensor has one of these shapes."""
    if tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise Misfit(f"{tensor.name} {list(tensor.shape)} should be {expected}")


def check_matrix(tensor: StoredTensor) -> tuple[int, int]:
    """Return the shape of a matrix. Raises Misfit for a tensor with another number of dimensions, or an empty one."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise Misfit(f"{tensor.name} {list(tensor.shape)} should be a matrix")
    return tensor.shape[0], tensor.shape[1]


def bytes_in(tensors: Sequence[StoredTensor]) -> int:
    return sum(tensor.stop - tensor.start for tensor in tensors)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return integers of 4 or 8 bits, packed into int32 [.., n] with the first lowest: uint8 [.., n · 32 / bits]."""
    packed = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    return packed if bits == 8 else nibbles(packed)


def nibbles(packed: Tensor) -> Tensor:
    """Return the low and the high half of each byte by turns: uint8 [.., n] → [.., 2n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the number of each code: [n]. This is several times as fast as indexing."""
    return table.index_select(0, codes.flatten().int())


def parts_of_rows(count: int) -> Iterator[slice]:
    """Yield slices of a few rows each, so that their temporary numbers take little memory."""
    for at in range(0, count, ROWS_AT_ONCE):
        yield slice(at, at + ROWS_AT_ONCE)
