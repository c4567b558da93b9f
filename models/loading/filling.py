"""From the tensors of a checkpoint to the parameters of a model."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from models.config import ModelConfig, ModelError
from models.family import Family, Piece, whole
from models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from models.layers.linear import Embedding, Linear
from models.loading.shards import StoredTensor, find_shards, listed, read_headers, read_tensors

HEAD = "lm_head.weight"
READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
Progress = Callable[[int, int], None]
PACKED = Linear | Embedding | Experts | SoftmaxRouter | SigmoidRouter
"""Layers whose weights are laid out for what computes."""
Filling = tuple[StoredTensor, list[Piece]]
"""A stored tensor and what it fills."""


def fill(
    model: nn.Module,
    family: Family,
    config: ModelConfig,
    path: Path,
    device: torch.device,
    tell: Progress,
    bits: int | None,
) -> None:
    """Fill the model's empty parameters from the folder's shards; each becomes integers of `bits` when it is complete.

    Raises ModelError for tensors that are missing, surplus, misshapen or not finite. tell: see load_model.
    """
    parameters = dict(model.named_parameters())
    files = find_shards(path)
    fillings, repeated = match(read_headers(files), parameters, family, config)
    pieces = {stored.name: pieces for stored, pieces in fillings}
    left = {name: parameter.numel() for name, parameter in parameters.items()}
    begun: dict[str, Tensor] = {}
    total, done = sum(file.stat().st_size for file in files), 0
    for stored, tensor in read_tensors([stored for stored, _ in fillings]):
        for piece in pieces[stored.name]:
            name = piece.parameter
            if name not in begun:
                begun[name] = torch.empty_like(parameters[name], device=device)
            part = piece.place(begun[name])
            part.copy_(piece.take(tensor))
            check_finite(stored.name, part)
            left[name] -= part.numel()
            if not left[name]:
                assign(model, name, begun.pop(name), bits)
        done += tensor.nbytes
        tell(done, total)
    tell(total, total)
    if repeated:
        table = next(stored for stored, pieces in fillings if pieces[0].parameter == family.embedding)
        _check_tied(repeated, table, parameters[family.embedding].dtype)


def match(
    stored: list[StoredTensor], parameters: dict[str, nn.Parameter], family: Family, config: ModelConfig
) -> tuple[list[Filling], StoredTensor | None]:
    """What each tensor fills that is not left out, and the head of a tied model, if the files repeat it.

    ModelError names all that does not fit. parameters: on the meta device.
    """
    fillings, repeated = list[Filling](), None
    surplus, misshapen, unreadable = list[str](), list[str](), list[str]()
    filled: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in stored:
        pieces = family.pieces(tensor.name, config)
        if not pieces:
            continue
        if tensor.dtype not in READABLE:
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
    empty = torch.empty(tensor.shape, dtype=READABLE.get(tensor.dtype, torch.float32), device="meta")
    for piece, part in zip(pieces, parts, strict=True):
        named, parameter = f"{tensor.name} {list(tensor.shape)}", parameters[piece.parameter]
        target = f"{list(part.shape)} of {piece.parameter} {list(parameter.shape)}"
        try:
            taken = piece.take(empty).shape
        except (RuntimeError, IndexError, ValueError):
            yield f"{named}, which has no part for {target}"
            continue
        if taken == part.shape:
            continue
        if piece.take is whole and part.shape == parameter.shape:
            yield f"{named}, expected {list(part.shape)}"
        else:
            yield f"{named}, of which {list(taken)} does not fit {target}"


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


def check_finite(name: str, weights: Tensor) -> None:
    # aminmax lets NaN through, and reads as fast as memory does: isfinite takes 20 times as long.
    low, high = weights.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(f"{name} holds NaN or infinity")


def _check_tied(head: StoredTensor, table: StoredTensor, dtype: torch.dtype) -> None:
    first, second = (tensor for _, tensor in read_tensors([head, table]))
    if not torch.equal(first.to(dtype), second.to(dtype)):
        raise ModelError(f"config.json ties the embeddings, but {head.name} differs from them")


def assign(model: nn.Module, name: str, tensor: Tensor, bits: int | None) -> None:
    """bits: if not None, a projection's weight becomes integers at once."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    if bits is not None and isinstance(owner, PACKED) and (leaf == "weight" or isinstance(owner, Experts)):
        owner.pack(bits)
