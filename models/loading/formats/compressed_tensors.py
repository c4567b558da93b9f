"""Integers of compressed-tensors, in words (pack-quantized) or as int8 (int-quantized), and the settings of layers."""

import re
from collections.abc import Mapping, Sequence
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

OFFSET = 128  # what makes an int8 not negative


@dataclass(frozen=True, kw_only=True)
class CompressedIntegers(GroupedIntegers):
    """A weight of integers. Its sources: the integers, the scales, and those of the others that it has."""

    zero: StoredTensor | None
    inputs_order: StoredTensor | None
    stated: StoredTensor | None  # the tensor with the shape

    def codes(self, read: Read) -> Tensor:
        if self.stated is not None and (shape := tuple(read(self.stated).tolist())) != self.shape:
            raise ModelError(f"{self.stated.name} holds {list(shape)}, but the tensors have {list(self.shape)}")
        codes = read(self.sources[0])
        return unpacked(codes, self.bits) if self.stated is not None else unsigned(codes)

    def zeros(self, read: Read) -> Tensor | None:
        if self.zero is None:
            return None
        outputs, groups = self.shape[0], -(-self.shape[1] // self.group)
        values = read(self.zero)
        if self.zero.dtype == "I8":
            check_zeros(self.zero.name, values, self.bits)
            zeros = unsigned(values) - (OFFSET - (1 << self.bits - 1))
            return zeros.reshape(-1, groups).expand(outputs, groups)
        return unpacked(values.t(), self.bits)[:, :outputs].t()

    def scales(self, read: Read) -> Tensor:
        outputs, groups = self.shape[0], -(-self.shape[1] // self.group)
        return read(self.sources[1]).reshape(-1, groups).expand(outputs, groups)

    def order(self, read: Read) -> Tensor | None:
        if self.inputs_order is None:
            return None
        order: Tensor = read(self.inputs_order)
        # -1 stands for groups of consecutive inputs.
        groups = -(-self.shape[1] // self.group)
        return None if (order == -1).all() else check_order(self.inputs_order.name, order, groups)


def unsigned(values: Tensor) -> Tensor:
    """Return int8 + 128 as uint8: for bytes, that is to invert the upper bit."""
    return torch.bitwise_xor(values.view(torch.uint8), OFFSET)


@dataclass(frozen=True)
class Scheme:
    """The settings of a group of layers."""

    targets: tuple[str, ...]  # names of layers, patterns ("re:…"), or classes of layers
    bits: int
    group: int | None  # inputs that share a scale; None: all
    is_symmetric: bool


@dataclass(frozen=True)
class Compressed:
    """The settings of all layers of integers."""

    schemes: tuple[Scheme, ...]

    def find(self, weight: StoredTensor, pool: Pool) -> CompressedIntegers | None:
        path, _, leaf = weight.name.rpartition(".")
        if (leaf, weight.dtype) not in (("weight_packed", "I32"), ("weight", "I8")):
            return None
        scheme = self.scheme_of(path)
        if scheme is None:
            raise Misfit(f"{weight.name} is of no group of layers with integers")
        if weight.dtype == "I8" and scheme.bits != 8:
            raise Misfit(f"{weight.name} has the dtype I8, not {scheme.bits} bits in I32")
        outputs, columns = check_matrix(weight)
        inputs = columns * 32 // scheme.bits if weight.dtype == "I32" else columns
        scale = companion(pool, weight, f"{path}.weight_scale", FLOATS)
        group = scheme.group or inputs
        groups = -(-inputs // group)
        shapes = [(outputs, groups), *([(outputs,), (1,), (), (1, 1)] if groups == 1 else [])]
        check_shape(scale, *shapes)
        sources = [weight, scale]
        stated = None
        if weight.dtype == "I32":
            stated = companion(pool, weight, f"{path}.weight_shape", ["I64", "I32"])
            check_shape(stated, (2,))
            sources.append(stated)
        zero = None
        if not scheme.is_symmetric:
            zero = companion(pool, weight, f"{path}.weight_zero_point", ["I32", "I8"])
            words = -(-outputs * scheme.bits // 32), groups
            check_shape(zero, *([words] if zero.dtype == "I32" else shapes))
            sources.append(zero)
        elif f"{path}.weight_zero_point" in pool:  # Symmetric weights may have zeros too; they are 0.
            sources.append(pool[f"{path}.weight_zero_point"])
        order = pool.get(f"{path}.weight_g_idx")
        if order is not None:
            check_shape(companion(pool, weight, order.name, ["I32", "I64"]), (inputs,))
            sources.append(order)
        has_zeros = zero is not None
        form = None if order is not None else form_of_integers(scheme.bits, inputs, group, has_zeros, scale.dtype)
        return CompressedIntegers(
            weight.file, f"{path}.weight", (outputs, inputs), f"int{scheme.bits}", stop=bytes_in(sources),
            sources=tuple(sources), bits=scheme.bits, group=group, form=form, zero=zero, inputs_order=order,
            stated=stated,
        )  # fmt: skip

    def scheme_of(self, path: str) -> Scheme | None:
        """Return the settings of a layer: those that name it, else those with its pattern, else those of a class."""
        if len({(scheme.bits, scheme.group, scheme.is_symmetric) for scheme in self.schemes}) == 1:
            return self.schemes[0]
        tests = (lambda target: target == path, lambda target: _matches(target, path), _is_class)
        return next((each for test in tests for each in self.schemes if any(map(test, each.targets))), None)


def check_zeros(name: str, zeros: Tensor, bits: int) -> None:
    """Raise ModelError for zeros that are no integers of `bits` bits."""
    low, high = (int(bound) for bound in zeros.aminmax()) if zeros.numel() else (0, 0)
    if low < -(1 << bits - 1) or high >= 1 << bits - 1:
        raise ModelError(f"{name} holds zeros from {low} to {high}, which {bits} bits do not represent")


MOST_OF_PATTERN = 1000  # characters


def _matches(target: str, path: str) -> bool:
    try:
        if len(target) > MOST_OF_PATTERN:
            raise re.error(f"it has more than {MOST_OF_PATTERN} characters")
        return target.startswith("re:") and re.match(target[3:], path) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"quantization_config: the target {target!r} is not a pattern: {error}") from None


def _is_class(target: str) -> bool:
    return "." not in target and not target.startswith("re:")


SCHEMES: Mapping[str, tuple[tuple[str, int, Sequence[str]], ...]] = {
    "float-quantized": (("float", 8, ("tensor", "channel", "block")),),
    "naive-quantized": (("float", 8, ("tensor", "channel", "block")), ("int", 8, ("tensor", "channel", "group"))),
    "int-quantized": (("int", 8, ("tensor", "channel", "group")),),
    "pack-quantized": (("int", 4, ("channel", "group")), ("int", 8, ("channel", "group"))),
    "nvfp4-pack-quantized": (("float", 4, ("tensor_group",)),),
    "mxfp4-pack-quantized": (("float", 4, ("group",)),),
}
"""The supported formats, and the types, bits and strategies of their weights."""


def check_scheme(layout: str, weights: Mapping[str, Any], supported: str) -> None:
    """Raise ModelError for weights that a format does not have or that are not supported."""
    kind = {key: weights.get(key) for key in ("type", "num_bits", "strategy")}
    if type(kind["num_bits"]) is not int or not any(
        (kind["type"], kind["num_bits"]) == each[:2] and kind["strategy"] in each[2] for each in SCHEMES[layout]
    ):
        raise ModelError(f"compressed-tensors' weights {kind} of format {layout} are not supported: {supported}")


def read_scheme(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Scheme:
    """Read the settings of a group of layers with integers. Raises ModelError for a wrong group_size or target."""
    size, targets = weights.get("group_size"), group.get("targets", [])
    if weights["strategy"] == "group" and (not isinstance(size, int) or not 1 <= size < 2**31):
        raise ModelError(f"quantization_config: group_size should be above 0, not {size!r}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"quantization_config: targets should be a list of names, not {targets!r}")
    shared, symmetric = size if weights["strategy"] == "group" else None, bool(weights.get("symmetric", True))
    return Scheme(tuple(targets), weights["num_bits"], shared, symmetric)
