"""Weights that stay as integers in memory, as a GGUF file or quantized safetensors have them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor, nn

from baton.kernels.linear.quantized import OUTPUTS_AT_ONCE, Form, Groups, QuantizedWeight, keep
from baton.kernels.linear.quantized.native import BLOCK, shape_of
from baton.kernels.moe.experts import PARTS, PackedExperts, keep as keep_experts
from baton.models.family import Piece, whole
from baton.models.gguf.blocks import BLOCKS
from baton.models.layers.experts import Experts
from baton.models.layers.linear import Embedding, Linear
from baton.models.loading.formats.composed import Composed, MixedGroups
from baton.models.loading.shards import StoredTensor

Part = tuple[StoredTensor, Piece]
ReadGroups = Callable[[StoredTensor, slice], Groups]
WHOLE = slice(None)
ReadFloats = Callable[[Part, Tensor], Tensor]
Kept = list[QuantizedWeight | Tensor] | PackedExperts
"""A weight that keeps the file's integers: the parts of a projection's weight, or the stacked weights of experts."""


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a weight that are of one form; None: floats."""

    form: Form | None
    rows: int
    parts: list[Part]  # in the order of the rows


def form_of(stored: StoredTensor) -> Form | None:
    """Return the form of a tensor's integers; None for floats, and for integers that are dequantized."""
    if isinstance(stored, Composed):
        return stored.form
    return BLOCKS[stored.dtype].form if stored.dtype in BLOCKS else None


def keep_weight(
    owner: nn.Module, name: str, empty: Tensor, parts: Sequence[Part], read: ReadGroups, floats: ReadFloats
) -> Kept | None:
    """Return the weight of a layer with the file's integers; None if no part is of integers, or the layer takes none.

    name, empty, parts: the parameter's name, shape and dtype, and what fills it.
    read: reads rows of a tensor's integers. floats: reads a part's values in the shape and dtype of an empty tensor.
    Raises MixedGroups if the integers cannot be kept.
    """
    leaf = name.rpartition(".")[2]
    if isinstance(owner, Experts):
        matrices = PARTS[owner.activation] if leaf == "input_linear" else 1
        return experts_kept(empty, matrices, parts, read)
    if isinstance(owner, Linear | Embedding) and leaf == "weight":
        return rows_kept(empty, runs_of(empty, parts), read, floats) or None
    return None


def runs_of(empty: Tensor, parts: Sequence[Part]) -> list[Run]:
    """Return the runs of a weight [outputs, inputs], from the first row on.

    Returns [] if no part is of integers, or if a part fills anything but consecutive whole rows.
    """
    inputs, views = empty.shape[1], [(piece.place(empty), (stored, piece)) for stored, piece in parts]
    if not any(form_of(stored) for stored, _ in parts) or any(computes(*part) for part in parts):
        return []
    if any(view.ndim != 2 or view.shape[1] != inputs or not view.is_contiguous() for view, _ in views):
        return []
    views.sort(key=lambda each: each[0].storage_offset())
    runs = []
    for form, group in groupby(views, key=lambda each: form_of(each[1][0])):
        members = list(group)
        runs.append(Run(form, sum(len(view) for view, _ in members), [part for _, part in members]))
    return runs


def rows_kept(
    empty: Tensor, runs: Sequence[Run], read: ReadGroups, floats: ReadFloats
) -> list[QuantizedWeight | Tensor]:
    """Return the weight of each run. Raises MixedGroups."""
    found = list[QuantizedWeight | Tensor]()
    for run in runs:
        if run.form is None:
            found.append(torch.cat([floats(part, part[1].place(empty)) for part in run.parts]))
        else:
            parts = rows_of(run, read)
            first = next(parts)  # All parts have its form, which may have smaller spans than the run's.
            found.append(keep(chain([first], parts), first.form, run.rows, empty.shape[1], empty.dtype))
    return found


def rows_of(run: Run, read: ReadGroups) -> Iterator[Groups]:
    """Yield the rows of a run: a few at a time if no row has to be moved or composed. Raises MixedGroups."""
    sizes = [math.prod(stored.shape[:-1]) for stored, _ in run.parts]
    if any(is_moved(*part) for part in run.parts) or any(size % BLOCK for size in sizes[:-1]):
        yield join_rows([take_part(read(stored, WHOLE), stored.shape, piece) for stored, piece in run.parts])
        return
    for (stored, _), size in zip(run.parts, sizes, strict=True):
        for at in range(0, size, OUTPUTS_AT_ONCE):
            yield read(stored, slice(at, min(at + OUTPUTS_AT_ONCE, size)))


def is_moved(stored: StoredTensor, piece: Piece) -> bool:
    """Return whether a tensor is composed of others, or a piece takes a part of it or moves its numbers."""
    return piece.take is not whole or isinstance(stored, Composed)


def computes(stored: StoredTensor, piece: Piece) -> bool:
    """Return whether a piece computes with a tensor's integers, instead of moving them: then they become floats."""
    if piece.take is whole or form_of(stored) is None:
        return False
    return piece.take(torch.empty(stored.shape, dtype=torch.int8, device="meta")).dtype != torch.int8


def experts_kept(empty: Tensor, matrices: int, parts: Sequence[Part], read: ReadGroups) -> PackedExperts | None:
    """Return the weights of experts [count, rows, inputs]; None if not all are integers of one form.

    matrices: of an expert. Raises MixedGroups.
    """
    count, rows, inputs = empty.shape
    forms, height = {form_of(stored) for stored, _ in parts}, rows // matrices
    form = forms.pop() if len(forms) == 1 else None
    views = [piece.place(empty) for _, piece in parts]
    if form is None or any(view.shape[-1] != inputs or view.shape[-2] % height for view in views):
        return None
    if any(computes(*part) for part in parts):
        return None

    def numbered() -> Iterator[tuple[int, Groups]]:
        """Yield each matrix with its number, one tensor or one matrix at a time."""
        for view, (stored, piece) in zip(views, parts, strict=True):
            first, of_expert = view.storage_offset() // inputs // height, view.shape[-2] // height
            for number, matrix in enumerate(matrices_of(stored, piece, height, read)):
                if matrix.form != form:
                    raise MixedGroups
                yield number // of_expert * matrices + first + number % of_expert, matrix

    return keep_experts(numbered(), form, (count * matrices, height, inputs), matrices, empty.dtype)


def matrices_of(stored: StoredTensor, piece: Piece, height: int, read: ReadGroups) -> Iterator[Groups]:
    """Yield the matrices of a tensor, each of `height` rows. Raises MixedGroups."""
    if is_moved(stored, piece):
        yield from take_part(read(stored, WHOLE), stored.shape, piece).split(height)
        return
    for at in range(0, math.prod(stored.shape[:-1]), height):
        yield read(stored, slice(at, at + height))


def take_part(groups: Groups, shape: Sequence[int], piece: Piece) -> Groups:
    """Return the part of a tensor's integers that a piece takes, as rows [.., inputs].

    shape: of the tensor. Raises MixedGroups if the piece computes, or moves numbers of one group apart.
    """
    if piece.take is whole:
        return groups
    codes, scales, factors, minima, minimum_factors = (
        None if field is None else piece.take(by_input(field, groups.codes.shape[1]).view(*shape))
        for field in groups.fields()
    )
    assert codes is not None and scales is not None
    if codes.dtype != torch.int8:  # Numbers that are only moved stay integers.
        raise MixedGroups
    rows, form = codes.reshape(-1, codes.shape[-1]), groups.form
    # A span of one group has no factors, so a span that has them cannot become one.
    spans = (span for span in (form.span, form.span // 2, form.span // 4) if span > (factors is not None))
    for span in spans:
        smaller = Form(form.bits, form.group, span, form.has_minima, form.dtype)
        try:
            return Groups(
                smaller,
                rows,
                by_group(scales, smaller.width),
                None if factors is None else by_group(factors, form.group),
                None if minima is None else by_group(minima, smaller.width),
                None if minimum_factors is None else by_group(minimum_factors, form.group),
            )
        except MixedGroups:
            continue
    raise MixedGroups


def by_input(field: Tensor, inputs: int) -> Tensor:
    """Return a field for each input: [outputs, n] → [outputs, inputs]."""
    return field.repeat_interleave(inputs // field.shape[1], 1)


def by_group(field: Tensor, width: int) -> Tensor:
    """Return the value that each `width` inputs share: the reverse of `by_input`. Raises MixedGroups if they differ."""
    rows = field.reshape(-1, field.shape[-1])
    if rows.shape[1] % width:
        raise MixedGroups
    groups = rows.view(len(rows), -1, width)
    if not torch.equal(groups, groups[..., :1].expand_as(groups)):
        raise MixedGroups
    return groups[..., 0].contiguous()


def join_rows(parts: Sequence[Groups]) -> Groups:
    """Return the rows of several weights as one. Raises MixedGroups unless they are of the same form."""
    if len({part.form for part in parts}) > 1:
        raise MixedGroups
    fields = zip(*(part.fields() for part in parts), strict=True)
    codes, scales, *others = (
        None if values[0] is None else torch.cat([value for value in values if value is not None]) for values in fields
    )
    assert codes is not None and scales is not None
    return Groups(parts[0].form, codes, scales, *others)


def bytes_saved_by_keeping(model: nn.Module, parts_of: dict[str, list[Part]]) -> int:
    """Return how many bytes the weights of a model take less if integers stay integers.

    parts_of: the parts that fill each parameter.
    """
    parameters = dict(model.named_parameters())
    return sum(parameters[name].nbytes - size for name, size in sizes_kept(model, parts_of))


def sizes_kept(model: nn.Module, parts_of: dict[str, list[Part]]) -> Iterator[tuple[str, int]]:
    """Yield (parameter, its bytes in memory) for each weight that keeps the file's integers.

    Some of these weights may be dequantized after all, because MixedGroups is only found when they are read.
    """
    for path, owner in model.named_modules():
        for leaf, empty in owner.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            parts = parts_of.get(name, [])
            if isinstance(owner, Linear | Embedding) and leaf == "weight":
                if runs := runs_of(empty, parts):
                    yield name, sum(run_bytes(run, empty) for run in runs)
            elif isinstance(owner, Experts):
                forms = {form_of(stored) for stored, _ in parts}
                form = forms.pop() if len(forms) == 1 else None
                if form is not None and not any(computes(*part) for part in parts):
                    matrices = PARTS[owner.activation] if leaf == "input_linear" else 1
                    rows = empty.shape[1] // matrices
                    yield name, len(empty) * matrices * kept_bytes(rows, empty.shape[2], form)


def run_bytes(run: Run, empty: Tensor) -> int:
    if run.form is None:
        return run.rows * empty.shape[1] * empty.itemsize
    return kept_bytes(run.rows, empty.shape[1], run.form)


def kept_bytes(outputs: int, inputs: int, form: Form) -> int:
    """Return the bytes of a packed weight [outputs, inputs]."""
    blocks, spans, size = shape_of(-(-outputs // BLOCK) * BLOCK, inputs, form)
    return blocks * spans * size
