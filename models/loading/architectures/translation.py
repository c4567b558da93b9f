"""The architectures of GGUF files: their metadata as a config.json, and their tensors as the family's own.

llama.cpp's converter (conversion/ in its repository) renames and changes tensors. Each change is undone here, when the
tensor is read. So a family is built and filled as if from the files that the converter read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, Piece, whole
from baton.models.gguf.header import GgufHeader
from baton.models.loading.architectures import delta, kimi, lfm2, mamba
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.architectures.shared import DECODER

LAST_NORMS = ("output_norm.weight", "token_embd_norm.weight")
KEY = "gguf_architecture"  # config key with the architecture of a GGUF file, which decides the names of its tensors


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files."""

    config: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str]  # a layer's tensor, without blk.N → the family's name, without the path of the layer
    outer: tuple[str, str, str]  # the family's names of the embeddings, of the layers' path, and of the last norm
    direct: Mapping[str, tuple[str, int | None]]
    """A layer's tensor that the family's files lack → the parameter, and which half of its rows (None: all rows)."""
    undo: Callable[[str, ModelConfig], Callable[[Tensor], Tensor]]
    """Function from (a tensor's name without blk.N, config) to the function that undoes the converter's change."""


ARCHITECTURES: dict[str, Architecture] = {
    "mamba2": Architecture(mamba.mamba2, mamba.MAMBA2, mamba.BACKBONE, {}, mamba.undo),
    "granitehybrid": Architecture(mamba.granite, mamba.GRANITE, DECODER, mamba.GRANITE_STACKS, mamba.undo),
    "falcon-h1": Architecture(mamba.falcon_h1, mamba.FALCON_H1, mamba.FALCON_DECODER, {}, mamba.undo),
    "nemotron_h": Architecture(mamba.nemotron_h, mamba.NEMOTRON_H, mamba.BACKBONE, {}, mamba.undo),
    "nemotron_h_moe": Architecture(
        mamba.nemotron_h, mamba.NEMOTRON_H, mamba.BACKBONE, mamba.NEMOTRON_STACKS, mamba.undo
    ),
    "qwen3next": Architecture(delta.qwen3_next, delta.QWEN, DECODER, delta.STACKS, delta.undo),
    "qwen35": Architecture(delta.qwen3_5, delta.QWEN, DECODER, {}, delta.undo_tiled),
    "qwen35moe": Architecture(delta.qwen3_5, delta.QWEN, DECODER, delta.STACKS, delta.undo_tiled),
    "lfm2": Architecture(lfm2.config, lfm2.NAMES, lfm2.DECODER, {}, lfm2.undo),
    "lfm2moe": Architecture(lfm2.config, lfm2.NAMES, lfm2.DECODER, lfm2.STACKS, lfm2.undo),
    "kimi-linear": Architecture(kimi.config, kimi.NAMES, DECODER, delta.STACKS, kimi.undo),
}


def config_values(header: GgufHeader) -> dict[str, Any]:
    """Return a file's metadata as the values of the family's config.json.

    Raises ModelError for an architecture that is not supported, and for metadata that is missing.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"GGUF: the architecture {name!r} is not supported (supported: {known})")
    found = Metadata(name, header)
    refuse_unsupported(found)
    try:
        return {
            KEY: name,
            "hidden_size": found.value("embedding_length"),
            "num_hidden_layers": found.layers,
            "vocab_size": found.shape("token_embd.weight")[0],
            "max_position_embeddings": found.value("context_length"),
            "tie_word_embeddings": not found.has("output.weight"),
            **ARCHITECTURES[name].config(found),
        }
    except (TypeError, IndexError, ArithmeticError) as error:
        raise ModelError(f"GGUF: the metadata does not describe a model of {name} ({error})") from None


def refuse_unsupported(found: Metadata) -> None:
    """Raise ModelError for scaled rotary embeddings, attention that is not causal, and sliding windows."""
    found.require("rope.scaling.type", "none")
    found.require("attention.causal", True)
    found.require("attention.sliding_window", 0)


def translated(family: Family, config: ModelConfig) -> Family:
    """Return the family; if the config is that of a GGUF file, with GGUF's names of tensors."""
    if KEY not in config.values:
        return family
    return replace(family, pieces=partial(pieces, family), can_have_head=False)


def pieces(family: Family, name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the tensor `name` of a GGUF file fills; [] for layers that predict further tokens."""
    architecture = ARCHITECTURES[config.values[KEY]]
    embeddings, layers, norm = architecture.outer
    outer = {"token_embd.weight": embeddings, "output.weight": "lm_head.weight", **dict.fromkeys(LAST_NORMS, norm)}
    if name in outer:
        return _pieces_of(family, outer[name], architecture.undo(name, config), config)
    prefix, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal():
        return [Piece(name)]
    if int(layer) >= config.integer("num_hidden_layers"):
        return []
    if leaf in architecture.direct:
        parameter, half = architecture.direct[leaf]
        return [Piece(f"{layers}.{layer}.{parameter}", place=whole if half is None else partial(half_of_rows, half))]
    if leaf not in architecture.names:
        return [Piece(name)]
    own = f"{layers}.{layer}.{architecture.names[leaf]}"
    return _pieces_of(family, own, architecture.undo(leaf, config), config)


def _pieces_of(family: Family, own: str, undo: Callable[[Tensor], Tensor], config: ModelConfig) -> list[Piece]:
    if undo is whole:
        return family.pieces(own, config)
    return [replace(piece, take=partial(_chained, undo, piece.take)) for piece in family.pieces(own, config)]


def _chained(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return second(first(tensor))


def half_of_rows(half: int, weight: Tensor) -> Tensor:
    """Return a view of the first or second half of the rows of a weight, or of each weight of a stack."""
    rows = weight.shape[-2] // 2
    return weight[..., half * rows : (half + 1) * rows, :]
