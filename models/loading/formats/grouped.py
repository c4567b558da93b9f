"""Weights as integers. A group of an output's inputs shares a scale and a zero point: (code - zero) · scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.quantized import Form, Groups
from baton.models.config import ModelError
from baton.models.loading.formats.composed import Composed, MixedGroups, Read, parts_of_rows

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that scales may have in memory."""


@dataclass(frozen=True, kw_only=True)
class GroupedIntegers(Composed):
    """A weight [outputs, inputs] of integers with scales and zero points.

    The formats store these in different ways. Each format defines `codes`, `zeros`, `scales` and, if groups need not be
    consecutive inputs, `order`.
    """

    bits: int  # of a code, 4 or 8
    group: int  # inputs of a group

    def codes(self, read: Read) -> Tensor:
        """Return the integers, from 0 to 2^bits - 1: uint8 [outputs, inputs]."""
        raise NotImplementedError

    def zeros(self, read: Read) -> Tensor | None:
        """Return the zero points, [outputs, groups]; None if all are 2^(bits-1)."""
        raise NotImplementedError

    def scales(self, read: Read) -> Tensor:
        """Return the scales, [outputs, groups]."""
        raise NotImplementedError

    def order(self, read: Read) -> Tensor | None:
        """Return the group of each input, [inputs]; None if groups are consecutive inputs.

        Raises ModelError for a group that does not exist.
        """
        return None

    def values(self, read: Read, dtype: torch.dtype) -> Tensor:
        codes, zeros, scales, order = self.codes(read), self.zeros(read), self.scales(read), self._other_order(read)
        outputs, inputs = self.shape
        result = torch.empty(outputs, inputs, dtype=dtype)
        for rows in parts_of_rows(outputs):
            numbers = codes[rows].float()
            numbers -= 2 ** (self.bits - 1) if zeros is None else self._of_inputs(zeros[rows], order)
            result[rows] = numbers.mul_(self._of_inputs(scales[rows], order))
        return result

    def _other_order(self, read: Read) -> Tensor | None:
        """Return the group of each input; None if groups are consecutive inputs, also if `order` lists them."""
        order = self.order(read)
        consecutive = torch.arange(self.shape[1]) // min(self.group, self.shape[1])
        return None if order is None or torch.equal(order, consecutive) else order

    def _of_inputs(self, numbers: Tensor, order: Tensor | None) -> Tensor:
        """Return the number of each input's group, float32: [outputs, groups] → [outputs, inputs]."""
        numbers, inputs = numbers.float().contiguous(), self.shape[1]
        if order is not None:
            return numbers.index_select(1, order)
        return numbers.unsqueeze(2).expand(-1, -1, min(self.group, inputs)).flatten(1)[:, :inputs]

    def groups(self, read: Read) -> Groups:
        form = self.form
        assert form is not None
        if self._other_order(read) is not None:
            raise MixedGroups
        codes, zeros = self.codes(read), self.zeros(read)
        scales = self.scales(read).repeat_interleave(self.group // form.width, 1)
        if not form.has_minima:
            if zeros is not None and not (zeros == form.zero).all():
                raise MixedGroups
            return Groups(form, (codes - form.zero).view(torch.int8), scales)  # uint8 wraps around as int8 does.
        assert zeros is not None
        # Both the scale and the minimum, scale · zero, are the file's scale times an integer, so nothing is rounded.
        zeros = zeros.to(torch.int8).repeat_interleave(self.group // form.group, 1)
        return Groups(form, codes.view(torch.int8), scales, torch.ones_like(zeros), scales, zeros)


def form_of_integers(bits: int, inputs: int, group: int, has_zeros: bool, scale_dtype: str) -> Form | None:
    """Return the form in memory of integers in groups of consecutive inputs; None if no form is exact.

    has_zeros: whether zero points may differ from 2^(bits-1).
    """
    dtype = DTYPES.get(scale_dtype)
    if dtype is None or group % 32 or inputs % group or (has_zeros and bits != 4):
        return None
    if not has_zeros:
        return Form(bits, 64 if group % 64 == 0 else 32, dtype=dtype)
    # Spans of two groups, because only the groups of such a span store a minimum as a factor times a shared number.
    return Form(4, next(size for size in (64, 32, 16) if group % (2 * size) == 0), span=2, has_minima=True, dtype=dtype)


def check_order(name: str, order: Tensor, groups: int) -> Tensor:
    """Return the group of each input as indices. Raises ModelError if one does not exist."""
    low, high = order.aminmax()
    if low < 0 or high >= groups:
        raise ModelError(
            f"{name} should have the numbers of groups from 0 to {groups - 1}, not {int(low)} to {int(high)}"
        )
    return order.long()
