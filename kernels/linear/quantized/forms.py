"""Forms of weights as integers in groups with scales, and such weights before they are packed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """A form of weights: a weight is scale · code - minimum, each shared by a group of consecutive inputs.

    Without minima, codes are signed, from -2^(bits-1) up. With minima, they are from 0 to 2^bits - 1.
    """

    bits: int  # of a code: 4, 5, 6 or 8; 8 only without minima
    group: int = 64  # inputs that share a scale: 16, 32 or 64
    span: int = 1
    """Groups that share a number. If there are several, a group's scale is this number times the group's factor, an
    integer of 8 bits; and its minimum likewise."""
    has_minima: bool = False
    dtype: torch.dtype = torch.bfloat16  # of the shared numbers: bfloat16 or float16

    @property
    def code(self) -> int:
        """The form as an integer for the C functions: see Form in product.h."""
        flags = 16 * self.has_minima + 32 * (self.dtype == torch.float16)
        return self.bits | flags | self.group << 8 | self.span << 16

    @property
    def zero(self) -> int:
        """The number that makes codes positive when it is added."""
        return 0 if self.has_minima else 2 ** (self.bits - 1)

    @property
    def width(self) -> int:
        """Inputs of a span."""
        return self.span * self.group

    def span_bytes(self, outputs: int) -> int:
        """Return the bytes of a span of inputs for some outputs."""
        return outputs * ((2 + self.span * (self.span > 1)) * (1 + self.has_minima) + self.width * self.bits // 8)


INTEGERS = {8: Form(8), 4: Form(4)}
"""The forms of reference.quantize, by bits."""


@dataclass(frozen=True)
class Groups:
    """The integers and scales of a weight [outputs, inputs] in a form. Inputs are padded with zeros to whole spans."""

    form: Form
    codes: Tensor  # int8 [outputs, inputs], signed unless the form has minima
    scales: Tensor  # of the form's dtype [outputs, spans]
    factors: Tensor | None = None  # int8 [outputs, groups]; None if a span is one group
    minima: Tensor | None = None  # as scales; None if the form has no minima
    minimum_factors: Tensor | None = None  # as factors

    @property
    def outputs(self) -> int:
        return len(self.codes)

    def split(self, outputs: int) -> Iterator["Groups"]:
        """Yield the weight in parts of at most `outputs` outputs."""
        for at in range(0, self.outputs, outputs):
            yield self.map(itemgetter(slice(at, at + outputs)))

    def fields(self) -> tuple[Tensor | None, ...]:
        """Return the tensors, in the order of the fields."""
        return self.codes, self.scales, self.factors, self.minima, self.minimum_factors

    def map(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """Return the weight with all its tensors changed."""
        codes, scales, *others = (None if field is None else change(field) for field in self.fields())
        assert codes is not None and scales is not None
        return Groups(self.form, codes, scales, *others)

    def numbers(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]. Only the subtraction of a minimum is rounded."""
        groups = self.codes.view(self.outputs, -1, self.form.group)
        numbers = self._of_groups(self.scales, self.factors) * groups.float()
        if self.minima is not None:
            numbers -= self._of_groups(self.minima, self.minimum_factors)
        return numbers.flatten(1)

    def _of_groups(self, shared: Tensor, factors: Tensor | None) -> Tensor:
        """Return the scales or minima of all groups, float32 [outputs, groups, 1]."""
        if factors is None:
            return shared.float().unsqueeze(2)
        each = shared.float().unsqueeze(2) * factors.view(self.outputs, -1, self.form.span).float()
        return each.view(self.outputs, -1, 1)
