"""The interface between a family and the loader: how to build the model, and what each stored tensor fills."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.batch import Model
from baton.models.config import ModelConfig


def whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint's tensor, and the part of a parameter that it fills."""

    parameter: str  # its name
    take: Callable[[Tensor], Tensor] = whole
    """Returns the part of the checkpoint's tensor. Its operations must work on meta tensors too."""
    place: Callable[[Tensor], Tensor] = whole
    """Returns the view of the parameter into which the part is copied; it has the part's shape.

    The views of a parameter do not overlap, and together they cover it."""


def scaled(*parts: tuple[int, float]) -> Callable[[Tensor], Tensor]:
    """Return a Piece.take that multiplies rows in float32. parts: (number of rows, factor), from the first row on."""

    def take(tensor: Tensor) -> Tensor:
        factors = torch.cat([torch.full((rows,), factor, device=tensor.device) for rows, factor in parts])
        return tensor.float() * factors.view(-1, *[1] * (tensor.ndim - 1))

    return whole if all(factor == 1 for _, factor in parts) else take


def gated_mlp(name: str) -> list[Piece]:
    """Return what gate_proj, up_proj or down_proj fills in models/layers/mlp.py:GatedMLP; [] for other tensors."""
    path, _, leaf = name.rpartition("_proj.")
    owner, _, part = path.rpartition(".")
    match part:
        case "gate":
            return [Piece(f"{owner}.input_linear.{leaf}", place=lambda parameter: parameter.chunk(2)[0])]
        case "up":
            return [Piece(f"{owner}.input_linear.{leaf}", place=lambda parameter: parameter.chunk(2)[1])]
        case "down":
            return [Piece(f"{owner}.output_linear.{leaf}")]
    return []


def expert_pieces(stacks: str, number: int, part: str) -> list[Piece]:
    """Return what the weight of one expert fills in models/layers/experts.py:Experts.

    stacks: the name of the Experts module.
    number: the expert's index.
    part: gate, up or down.
    """
    if part == "down":
        return [Piece(f"{stacks}.output_linear", place=lambda stack: stack[number])]
    half = int(part == "up")
    return [Piece(f"{stacks}.input_linear", place=lambda stack: half_of(stack[number], half))]


def half_of(weight: Tensor, half: int) -> Tensor:
    """Return a view of the first or second half of a weight's rows.

    Slicing is faster than Tensor.chunk, which would take seconds for files with 50,000 experts' weights.
    """
    rows = len(weight) // 2
    return weight[half * rows : (half + 1) * rows]


def rows_of(rows: slice) -> Callable[[Tensor], Tensor]:
    """Return a Piece.place for these rows of a parameter."""
    return lambda parameter: parameter[rows]


@dataclass(frozen=True)
class Family:
    """A family of models, as the loader uses it."""

    build: Callable[[ModelConfig, torch.dtype, torch.dtype], Model]
    """Builds a model with empty parameters, from its config, the weights' dtype and the recurrent states' dtype.

    It is called under the meta device."""
    pieces: Callable[[str, ModelConfig], list[Piece]]
    """Returns what the checkpoint's tensor of this name fills; [] for a tensor that is not loaded."""
    embedding: str  # name of the embeddings' parameter, which one whole tensor fills, and which a tied head repeats
