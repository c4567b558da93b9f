"""Which tensor of a checkpoint fills what of which parameter."""

from collections import defaultdict
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, Piece, whole
from baton.models.loading.shards import StoredTensor, listed

HEAD = "lm_head.weight"
READABLE = ("F32", "BF16", "F16", "F64")
Filling = tuple[StoredTensor, list[Piece]]
"""A stored tensor and what it fills."""


def match(
    stored: list[StoredTensor],
    parameters: dict[str, nn.Parameter],
    family: Family,
    config: ModelConfig,
    scaled: Collection[str] = (),
) -> tuple[list[Filling], StoredTensor | None]:
    """What each tensor fills that is not left out, and the head of a tied model, if the files repeat it.

    ModelError names all that does not fit. parameters: on the meta device. scaled: the tensors that have a scale.
    """
    fillings, repeated = list[Filling](), None
    surplus, misshapen, unreadable = list[str](), list[str](), list[str]()
    filled: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in stored:
        pieces = family.pieces(tensor.name, config)
        if not pieces:
            continue
        if tensor.dtype not in READABLE and tensor.name not in scaled:
            unreadable.append(f"{tensor.name} ({tensor.dtype})")
        is_repeated = pieces == [Piece(HEAD)] and HEAD not in parameters
        if is_repeated:
            repeated, pieces = tensor, [Piece(family.embedding)]
        parts = _places(pieces, parameters)
        if parts is None:
            surplus.append(tensor.name)
            continue
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
        told = "; ".join(f"{what}: {listed(names)}" for what, names in faults.items() if names)
        raise ModelError(f"{stored[0].file.parent} does not fit its config.json: {told}")
    return fillings, repeated


def _places(pieces: list[Piece], parameters: dict[str, nn.Parameter]) -> list[Tensor] | None:
    """The part of its parameter that each piece fills; None if one is not there, as of an expert too many."""
    try:
        return [piece.place(parameters[piece.parameter].detach()) for piece in pieces]
    except (KeyError, IndexError):
        return None


def _misfits(
    tensor: StoredTensor, pieces: list[Piece], parts: list[Tensor], parameters: dict[str, nn.Parameter]
) -> Iterator[str]:
    """What is wrong with the tensor's shape, for each part that it does not fit."""
    for piece, part in zip(pieces, parts, strict=True):
        taken = _taken(piece, tensor)
        if taken == part.shape:
            continue
        named, parameter = f"{tensor.name} {list(tensor.shape)}", parameters[piece.parameter]
        target = f"{list(part.shape)} of {piece.parameter} {list(parameter.shape)}"
        if taken is None:
            yield f"{named}, which has no part for {target}"
        elif piece.take is whole and part.shape == parameter.shape:
            yield f"{named}, expected {list(part.shape)}"
        else:
            yield f"{named}, of which {list(taken)} does not fit {target}"


def _taken(piece: Piece, tensor: StoredTensor) -> tuple[int, ...] | None:
    """The shape of what a piece takes; None if the tensor has no such part."""
    if piece.take is whole:
        return tuple(tensor.shape)
    try:
        return piece.take(torch.empty(tensor.shape, device="meta")).shape
    except (RuntimeError, IndexError, ValueError):
        return None


def _gaps(parameters: dict[str, nn.Parameter], filled: dict[str, list[Tensor]], fillings: list[Filling]) -> list[str]:
    """Parameters that are filled, but not every element of them once."""
    found = []
    for name, parts in filled.items():
        views = {(part.storage_offset(), part.shape, part.stride()) for part in parts}
        there, wanted = sum(part.numel() for part in parts), parameters[name].numel()
        if there == wanted and len(views) == len(parts):
            continue
        sources = [stored.name for stored, pieces in fillings if any(piece.parameter == name for piece in pieces)]
        found.append(f"{name} ({there} of {wanted} elements, from {listed(sources, 3)})")
    return found
