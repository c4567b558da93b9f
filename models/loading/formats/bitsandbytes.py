"""bitsandbytes' NF4 and FP4: codes of a table of 16 numbers, times a size for each block of the flattened weight."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelError
from baton.models.loading.formats.composed import (
    Composed,
    Misfit,
    Pool,
    Read,
    bytes_in,
    check_shape,
    companion,
    looked_up,
)
from baton.models.loading.shards import StoredTensor

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
AT_ONCE = 1 << 16  # blocks


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a weight that its tensors do not show."""

    shape: tuple[int, ...]  # of the weight
    size: int  # numbers that share a size
    nested_size: int  # sizes that share a size, if they are codes too
    offset: float  # what is added to sizes that are codes


MOST_SETTINGS = 1 << 16  # bytes; real ones are a few hundred
MOST_IN_BLOCK = 4096  # weights that share a size, and sizes that share one


@dataclass(frozen=True, kw_only=True)
class TableCodes(Composed):
    """A weight of 4-bit codes. Its sources: the codes, the sizes of blocks, the table, the settings; if the sizes are
    codes too, then also their sizes and their table.
    """

    settings: BlockSettings | None  # None in an outline of a file, which has only its header

    def values(self, read: Read, dtype: torch.dtype) -> Tensor:
        packed, table, settings = read(self.sources[0]).flatten(), read(self.sources[2]).float(), self.settings
        if settings is None:
            raise ModelError(f"{self.sources[3].name} holds nothing")
        size, count = settings.size, math.prod(self.shape)
        sizes = self._sizes(read, settings)
        result = torch.empty(count, dtype=dtype)
        step = AT_ONCE * size
        for at in range(0, count, step):
            part = packed[at // 2 : (at + step) // 2]
            codes = torch.stack([part >> 4, part & 15], dim=-1).flatten()[: count - at]
            blocks = sizes[at // size :][:AT_ONCE].repeat_interleave(size)[: len(codes)]
            result[at : at + step] = looked_up(table, codes).mul_(blocks)
        return result.view(self.shape)

    def _sizes(self, read: Read, settings: BlockSettings) -> Tensor:
        """Return the size of each block, float32."""
        sizes = read(self.sources[1]).flatten()
        if len(self.sources) == 4:
            return sizes.float()
        of_sizes, table = read(self.sources[4]).float().flatten(), read(self.sources[5]).float()
        each = of_sizes.repeat_interleave(settings.nested_size)[: len(sizes)]
        return looked_up(table, sizes).mul_(each).add_(settings.offset)


def find_codes(packed: StoredTensor, pool: Pool) -> TableCodes | None:
    """Find a weight of NF4 or FP4: bytes with settings."""
    name = packed.name
    if packed.dtype != "U8" or not name.endswith(".weight"):
        return None
    kind = next((kind for kind in KINDS if name + STATE + kind in pool), None)
    if kind is None:
        raise Misfit(f"{name} has no {STATE[1:]}nf4 or fp4")
    sizes = companion(pool, packed, f"{name}.absmax", ["F32", "U8"])
    table = companion(pool, packed, f"{name}.quant_map", ["F32"])
    check_shape(table, (16,))
    sources = [packed, sizes, table, companion(pool, packed, name + STATE + kind, ["U8"])]
    if sizes.dtype == "U8":
        sources.append(companion(pool, packed, f"{name}.nested_absmax", ["F32"]))
        sources.append(companion(pool, packed, f"{name}.nested_quant_map", ["F32"]))
        check_shape(sources[-1], (256,))
    settings = read_settings(sources)
    shape = (2 * math.prod(packed.shape),) if settings is None else settings.shape
    return TableCodes(
        packed.file, name, shape, kind.upper(), stop=bytes_in(sources), sources=tuple(sources),
        has_shape=settings is not None, settings=settings,
    )  # fmt: skip


def read_settings(sources: Sequence[StoredTensor]) -> BlockSettings | None:
    """Read the settings, a few hundred bytes: headers do not state the shape. sources: see TableCodes.

    Returns None for an outline of a file, which has zeros there. Raises Misfit if the settings do not fit the tensors.
    """
    packed, sizes, _, state, *nested = sources
    length = state.stop - state.start
    if length > MOST_SETTINGS:
        raise Misfit(f"{state.name} has {length} bytes, but settings have at most {MOST_SETTINGS}")
    with state.file.open("rb") as opened:
        opened.seek(state.start)
        text = opened.read(length)
    if not any(text):
        return None
    try:
        found = json.loads(text)
        shape, size = tuple(int(size) for size in found["shape"]), int(found["blocksize"])
        nested_size = int(found["nested_blocksize"]) if nested else 1
        offset = float(found["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Misfit(f"{state.name} does not hold the settings of a weight: {error!r}") from None
    count, blocks = math.prod(shape), math.prod(sizes.shape)
    if min(shape, default=0) < 1 or -(-count // 2) != math.prod(packed.shape):
        raise Misfit(f"{state.name} says the shape {list(shape)}, which does not fit {packed.name}")
    if size < 2 or size % 2 or max(size, nested_size) > MOST_IN_BLOCK or blocks != -(-count // size):
        raise Misfit(f"{state.name} says blocks of {size}, which do not fit {sizes.name}")
    if nested and (nested_size < 1 or math.prod(nested[0].shape) != -(-blocks // nested_size)):
        raise Misfit(f"{state.name} says nested blocks of {nested_size}, which do not fit {nested[0].name}")
    return BlockSettings(shape, size, nested_size, offset)


def check_bitsandbytes(values: Mapping[str, Any], supported: str) -> None:
    """Raise ModelError for LLM.int8, and for storage in other dtypes than bytes."""
    if not values.get("load_in_4bit", values.get("_load_in_4bit")):
        raise ModelError(f"bitsandbytes' load_in_8bit is not supported: {supported}")
    if (kind := values.get("bnb_4bit_quant_type", "fp4")) not in list(KINDS):
        raise ModelError(f"bitsandbytes' bnb_4bit_quant_type {kind!r} is not supported: {supported}")
    if (storage := values.get("bnb_4bit_quant_storage", "uint8")) not in ("uint8", None):
        raise ModelError(f"bitsandbytes' bnb_4bit_quant_storage {storage!r} is not supported: {supported}")
