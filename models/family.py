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
    """A part of a checkpoint's tensor, and the part of a parameter of the model that it fills."""

    parameter: str  # the parameter's name
    take: Callable[[Tensor], Tensor] = whole
    """Function from the checkpoint's tensor to its part. It must also work on meta tensors, which have only shapes."""
    place: Callable[[Tensor], Tensor] = whole
    """Function from the parameter to the view into which the part is copied. The view has the shape of the part.

    The views of one parameter do not overlap, and together they cover the parameter."""


def scaled(*parts: tuple[int, float]) -> Callable[[Tensor], Tensor]:
    """Return a Piece.take that multiplies rows in float32. parts: (number of rows, factor), from the top down."""

    def take(tensor: Tensor) -> Tensor:
        factors = torch.cat([torch.full((rows,), factor, device=tensor.device) for rows, factor in parts])
        return tensor.float() * factors.view(-1, *[1] * (tensor.ndim - 1))

    return whole if all(factor == 1 for _, factor in parts) else take


def gated_mlp(name: str) -> list[Piece]:
    """Return the part of layers/mlp.py:GatedMLP that gate_proj, up_proj or down_proj fills; [] for other tensors."""
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
    """Return which part of models/layers/experts.py:Experts the stored weight of one expert fills.

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
    """Return a Piece.place that takes the slice `rows` of a parameter."""
    return lambda parameter: parameter[rows]


def is_of_head(name: str) -> bool:
    """Return whether a stored tensor belongs to a head for multi-token prediction (MTP)."""
    return name.startswith(("mtp.", "model.mtp.", "backbone.mtp."))


@dataclass(frozen=True)
class Family:
    """A family of models: the functions by which the loader builds and fills a model."""

    build: Callable[[ModelConfig, torch.dtype, torch.dtype], Model]
    """Function from (config, dtype of the weights, dtype of the recurrent states) to a model with empty parameters.

    The loader calls it with torch's meta device as the default."""
    pieces: Callable[[str, ModelConfig], list[Piece]]
    """Function from (name of a stored tensor, config) to what the tensor fills; [] for a tensor that is not loaded."""
    embedding: str  # name of the embeddings' parameter; one whole tensor fills it, and a tied head has the same values
    can_have_head: bool = False  # whether files may hold a head for multi-token prediction that `build` can build
