"""Matching of a checkpoint's tensors to the parameters that they fill."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, Piece, whole
from baton.models.gguf.blocks import BLOCKS
from baton.models.loading.formats.composed import Composed
from baton.models.loading.shards import StoredTensor, listed

HEAD = "lm_head.weight"
READABLE = ("F32", "BF16", "F16", "F64", *BLOCKS)
Filling = tuple[StoredTensor, list[Piece]]
"""A stored tensor and the pieces of it that fill parameters."""


def match(
    stored: list[StoredTensor],
    parameters: dict[str, nn.Parameter],
    family: Family,
    config: ModelConfig,
) -> tuple[list[Filling], StoredTensor | None]:
    """Return what each tensor fills, except tensors that the family leaves out. If the model is tied and the files
    contain a head, also return that head; else None.

    parameters: the model's parameters by name, on the meta device.
    Raises ModelError, which lists everything that does not fit.
    """
    fillings, repeated = list[Filling](), None
    surplus, misshapen, unreadable = list[str](), list[str](), list[str]()
    filled: dict[str, list[Tensor]] = defaultdict(list)
    root = missing_root(stored, family)
    for tensor in stored:
        pieces = family.pieces(root + tensor.name, config)
        if not pieces:
            continue
        if tensor.dtype not in READABLE and not isinstance(tensor, Composed):
            unreadable.append(f"{tensor.name} ({tensor.dtype})")
        is_repeated = pieces == [Piece(HEAD)] and HEAD not in parameters
        if is_repeated:
            repeated, pieces = tensor, [Piece(family.embedding)]
        parts = _places(pieces, parameters)
        if parts is None:
            surplus.append(tensor.name)
            continue
        if isinstance(tensor, Composed) and not tensor.has_shape:
            tensor = _shaped(tensor, pieces, parts)
        misshapen += _misfits(tensor, pieces, parts, parameters)
        if not is_repeated:
            fillings.append((tensor, pieces))
            for piece, part in zip(pieces, parts, strict=True):
                filled[piece.parameter].append(part)
    faults = {
        "unsupported dtypes": unreadable,
        "surplus tensors": surplus,
        "missing tensors": sorted(parameters.keys() - filled.keys()),
        "wrong shapes": misshapen,
        "parameters not filled once": [] if misshapen else _gaps(parameters, filled, fillings),
    }
    if any(faults.values()):
        problems = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
        raise ModelError(f"{stored[0].file.parent} does not fit its config.json: {problems}")
    return fillings, repeated


def missing_root(stored: list[StoredTensor], family: Family) -> str:
    """Return the prefix that the tensors' names lack: files without a head may leave out the name of the body."""
    root, _, rest = family.embedding.partition(".")
    return f"{root}." if rest and any(tensor.name == rest for tensor in stored) else ""


def _places(pieces: list[Piece], parameters: dict[str, nn.Parameter]) -> list[Tensor] | None:
    """Return the view of its parameter that each piece fills; None if a piece has none, such as an expert too many."""
    try:
        return [piece.place(parameters[piece.parameter].detach()) for piece in pieces]
    except (KeyError, IndexError):
        return None


def _shaped(tensor: Composed, pieces: list[Piece], parts: list[Tensor]) -> Composed:
    """Return a tensor whose headers state only its number of elements with the shape that the model needs."""
    count = tensor.shape[0]
    sizes = dict.fromkeys(size for part in parts for size in reversed(part.shape) if size and count % size == 0)
    for shape in [tuple(parts[0].shape), *((count // size, size) for size in sizes)]:
        shaped = replace(tensor, shape=shape)
        fits = (_shape_taken(piece, shaped) == part.shape for piece, part in zip(pieces, parts, strict=True))
        if math.prod(shape) in (count, count - 1) and all(fits):
            return shaped
    return tensor


def _misfits(
    tensor: StoredTensor, pieces: list[Piece], parts: list[Tensor], parameters: dict[str, nn.Parameter]
) -> Iterator[str]:
    """Yield a description of each part of a parameter that the tensor's shape does not fit."""
    for piece, part in zip(pieces, parts, strict=True):
        shape = _shape_taken(piece, tensor)
        if shape == part.shape:
            continue
        named, parameter = f"{tensor.name} {list(tensor.shape)}", parameters[piece.parameter]
        target = f"{list(part.shape)} of {piece.parameter} {list(parameter.shape)}"
        if shape is None:
            yield f"{named}, which has no part for {target}"
        elif piece.take is whole and part.shape == parameter.shape:
            yield f"{named}, expected {list(part.shape)}"
        else:
            yield f"{named}, of which {list(shape)} does not fit {target}"


def _shape_taken(piece: Piece, tensor: StoredTensor) -> tuple[int, ...] | None:
    """Return the shape of the part that a piece takes from the tensor; None if the tensor has no such part."""
    if piece.take is whole:
        return tuple(tensor.shape)
    try:
        return piece.take(torch.empty(tensor.shape, device="meta")).shape
    except (RuntimeError, IndexError, ValueError, TypeError):  # torch takes no size of 2^63 and more.
        return None


def _gaps(parameters: dict[str, nn.Parameter], filled: dict[str, list[Tensor]], fillings: list[Filling]) -> list[str]:
    """Describe each parameter with elements that are not filled, or are filled more than once."""
    found = []
    for name, parts in filled.items():
        # Views of a parameter are equal or disjoint. If all differ and their sizes add up, each element is filled once.
        views = {(part.storage_offset(), part.shape, part.stride()) for part in parts}
        count, size = sum(part.numel() for part in parts), parameters[name].numel()
        if count == size and len(views) == len(parts):
            continue
        sources = [stored.name for stored, pieces in fillings if any(piece.parameter == name for piece in pieces)]
        found.append(f"{name} ({count} of {size} elements, from {listed(sources, 3)})")
    return found
