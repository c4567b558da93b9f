"""What a family gives to the loader."""

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
    """A part of a checkpoint's tensor, and the part of a parameter that it fills.

    take: of the checkpoint's tensor; any operations that work on meta tensors too.
    place: a view of the parameter, into which the taken part is copied; its shape is the taken part's.
    The views of a parameter do not overlap, and cover it.
    """

    parameter: str
    take: Callable[[Tensor], Tensor] = whole
    place: Callable[[Tensor], Tensor] = whole


def scaled(*parts: tuple[int, float]) -> Callable[[Tensor], Tensor]:
    """For Piece.take: rows in parts of (how many, times what), multiplied in float32."""

    def take(tensor: Tensor) -> Tensor:
        factors = torch.cat([torch.full((rows,), factor, device=tensor.device) for rows, factor in parts])
        return tensor.float() * factors.view(-1, *[1] * (tensor.ndim - 1))

    return whole if all(factor == 1 for _, factor in parts) else take


def gated_mlp(name: str) -> list[Piece]:
    """What gate_proj, up_proj and down_proj fill of models/layers/mlp.py:GatedMLP; none for another tensor."""
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
    """What the weight of one expert (part: gate, up or down) fills of models/layers/experts.py:Experts at `stacks`."""
    if part == "down":
        return [Piece(f"{stacks}.output_linear", place=lambda stack: stack[number])]
    half = int(part == "up")
    return [Piece(f"{stacks}.input_linear", place=lambda stack: half_of(stack[number], half))]


def half_of(weight: Tensor, half: int) -> Tensor:
    """Of its rows; there are files of 50,000 such, and Tensor.chunk would take seconds."""
    rows = len(weight) // 2
    return weight[half * rows : (half + 1) * rows]


@dataclass(frozen=True)
class Family:
    """build: with the types of its weights and of its recurrent states; a model whose parameters, if any, are empty. It
    runs under the meta device.

    pieces: what a checkpoint's tensor of this name fills; none for one that is left out.
    embedding: the name of the parameter that a tied head repeats; one tensor fills it, whole.
    """

    build: Callable[[ModelConfig, torch.dtype, torch.dtype], Model]
    pieces: Callable[[str, ModelConfig], list[Piece]]
    embedding: str
