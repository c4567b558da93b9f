"""AWQ as AutoAWQ writes it ("gemm"): 4-bit integers, eight outputs in a word, with a zero for each group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelError
from baton.models.loading.formats.composed import (
    FLOATS,
    Misfit,
    Pool,
    Read,
    bytes_in,
    check_matrix,
    check_shape,
    companion,
)
from baton.models.loading.formats.grouped import GroupedIntegers, form_of_integers
from baton.models.loading.shards import StoredTensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word, from the lowest, in which each of its eight outputs is."""


@dataclass(frozen=True, kw_only=True)
class AwqIntegers(GroupedIntegers):
    """A weight of AWQ. All its tensors have the outputs in the last dimension."""

    def codes(self, read: Read) -> Tensor:
        return _by_output(read(self.sources[0]))

    def zeros(self, read: Read) -> Tensor:
        return _by_output(read(self.sources[1]))

    def scales(self, read: Read) -> Tensor:
        return read(self.sources[2]).t()


def _by_output(words: Tensor) -> Tensor:
    """Return the integers in words [n, outputs / 8]: uint8 [outputs, n]."""
    by_word = words.t().contiguous()
    codes = torch.empty(len(by_word), 8, by_word.shape[1], dtype=torch.uint8)
    for output, place in enumerate(PLACES):
        codes[:, output] = by_word >> 4 * place & 15
    return codes.flatten(0, 1)


@dataclass(frozen=True)
class Awq:
    """The settings of AWQ."""

    group: int  # inputs of a group; -1: all

    def find(self, words: StoredTensor, pool: Pool) -> AwqIntegers | None:
        path = words.name.removesuffix(".qweight")
        if path == words.name:
            return None
        if words.dtype != "I32":
            raise Misfit(f"{words.name} has the dtype {words.dtype}, not I32")
        inputs, columns = check_matrix(words)
        group = self.group if self.group > 0 else inputs
        groups, outputs = -(-inputs // group), 8 * columns
        zeros = companion(pool, words, f"{path}.qzeros", ["I32"])
        scales = companion(pool, words, f"{path}.scales", FLOATS)
        check_shape(zeros, (groups, columns))
        check_shape(scales, (groups, outputs))
        sources = words, zeros, scales
        return AwqIntegers(
            words.file, f"{path}.weight", (outputs, inputs), "AWQ int4", stop=bytes_in(sources), sources=sources,
            bits=4, group=group, form=form_of_integers(4, inputs, group, True, scales.dtype),
        )  # fmt: skip


def read_awq(values: Mapping[str, Any], supported: str) -> Awq:
    """Read the settings. Raises ModelError for other versions, number of bits, or symmetric weights."""
    version = values.get("version") or values.get("checkpoint_format") or "gemm"
    bits, group = values.get("bits", values.get("w_bit", 4)), values.get("group_size", values.get("q_group_size", 128))
    if str(version).lower() != "gemm":
        raise ModelError(f"AWQ's version {version!r} is not supported: {supported}")
    if bits != 4:
        raise ModelError(f"AWQ of {bits!r} bits is not supported: {supported}")
    if not values.get("zero_point", True):
        raise ModelError(f"AWQ with zero_point false is not supported: {supported}")
    if not isinstance(group, int) or (group < 1 and group != -1):
        raise ModelError(f"quantization_config: group_size should be above 0 or -1, not {group!r}")
    return Awq(group)
