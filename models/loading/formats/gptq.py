"""GPTQ: integers of 4 or 8 bits, several inputs in a word, with a zero for each group, and possibly ordered groups."""

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
    unpacked,
)
from baton.models.loading.formats.grouped import GroupedIntegers, check_order, form_of_integers
from baton.models.loading.shards import StoredTensor

ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones, by the bits of an integer."""


@dataclass(frozen=True, kw_only=True)
class GptqIntegers(GroupedIntegers):
    """A weight of GPTQ."""

    is_less_one: bool  # whether zeros are stored less one

    def codes(self, read: Read) -> Tensor:
        return unpacked(read(self.sources[0]).t().contiguous(), self.bits)

    def zeros(self, read: Read) -> Tensor:
        words = read(self.sources[1])
        if self.is_less_one:
            # The writer subtracts ones from whole words, so that a zero of 0 borrows from the next one. Undo the same.
            words = (words.long() + ONES[self.bits]).to(torch.int32)
        return unpacked(words, self.bits).t()

    def scales(self, read: Read) -> Tensor:
        return read(self.sources[2]).t()

    def order(self, read: Read) -> Tensor | None:
        if len(self.sources) < 4:
            return None
        groups = self.sources[2].shape[0]
        return check_order(self.sources[3].name, read(self.sources[3]), groups)


@dataclass(frozen=True)
class Gptq:
    """The settings of GPTQ."""

    group: int  # inputs of a group; -1: all
    is_less_one: bool  # see GptqIntegers
    is_symmetric: bool
    is_ordered: bool  # whether groups may be other inputs than consecutive ones

    def find(self, words: StoredTensor, pool: Pool) -> GptqIntegers | None:
        path = words.name.removesuffix(".qweight")
        if path == words.name:
            return None
        if words.dtype != "I32":
            raise Misfit(f"{words.name} has the dtype {words.dtype}, not I32")
        lines, outputs = check_matrix(words)
        zeros = companion(pool, words, f"{path}.qzeros", ["I32"])
        scales = companion(pool, words, f"{path}.scales", FLOATS)
        columns = check_matrix(zeros)[1]
        bits = next((bits for bits in ONES if columns * 32 == bits * outputs), None)
        if bits is None:
            raise Misfit(f"{zeros.name} {list(zeros.shape)} does not fit 4 or 8 bits of {outputs} outputs")
        inputs = lines * 32 // bits
        groups = check_matrix(scales)[0]
        group = self._group(inputs, groups)
        if group is None:
            raise Misfit(f"{scales.name} {list(scales.shape)} does not fit {inputs} inputs in groups of {self.group}")
        check_shape(scales, (groups, outputs))
        check_shape(zeros, (groups, columns))
        sources = [words, zeros, scales]
        if self.is_ordered or f"{path}.g_idx" in pool:
            order = companion(pool, words, f"{path}.g_idx", ["I32", "I64"])
            check_shape(order, (inputs,))
            sources.append(order)
        form = None if self.is_ordered else form_of_integers(bits, inputs, group, not self.is_symmetric, scales.dtype)
        return GptqIntegers(
            words.file, f"{path}.weight", (outputs, inputs), f"GPTQ int{bits}", stop=bytes_in(sources),
            sources=tuple(sources), bits=bits, group=group, is_less_one=self.is_less_one, form=form,
        )  # fmt: skip

    def _group(self, inputs: int, groups: int) -> int | None:
        """Return how many inputs a group has; None if `groups` groups do not fit.

        A layer with its own settings (`dynamic`) may have groups of another size than group_size.
        """
        stated = self.group if self.group > 0 else inputs
        if -(-inputs // stated) == groups:
            return stated
        return None if inputs % groups else inputs // groups


def read_gptq(values: Mapping[str, Any], supported: str) -> Gptq:
    """Read the settings. Raises ModelError for another checkpoint_format or number of bits."""
    layout, bits = values.get("checkpoint_format") or "gptq", values.get("bits", 4)
    group = values.get("group_size", 128)
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ's checkpoint_format {layout!r} is not supported: {supported}")
    if bits not in tuple(ONES):
        raise ModelError(f"GPTQ of {bits!r} bits is not supported: {supported}")
    if not isinstance(group, int) or (group < 1 and group != -1):
        raise ModelError(f"quantization_config: group_size should be above 0 or -1, not {group!r}")
    is_ordered = bool(values.get("desc_act")) and not values.get("static_groups")
    return Gptq(group, layout == "gptq", bool(values.get("sym", True)), is_ordered)
