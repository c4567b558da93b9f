"""Filling of a model's parameters from the tensors of a checkpoint."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, Piece
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.linear import Embedding, HeadLinear, Linear
from baton.models.loading.matching import Filling, match
from baton.models.loading.parallel import in_threads
from baton.models.loading.quantization import Scaled, dequantize, pair_scales, read_quantization
from baton.models.loading.shards import MappedShards, StoredTensor, find_shards, read_headers

THREADS = 4
ROWS_COMPARED = 4096
Progress = Callable[[int, int], None]
PACKED = Linear | HeadLinear | Embedding | Experts | SoftmaxRouter | SigmoidRouter
"""Layers whose weights are packed into the layout of a kernel."""


def fill(
    model: nn.Module,
    family: Family,
    config: ModelConfig,
    path: Path,
    device: torch.device,
    on_progress: Progress,
    bits: int | None,
) -> None:
    """Fill the model's empty parameters from the files in folder `path`.

    on_progress, bits: see load_model. Raises ModelError for tensors that are missing, surplus, misshapen or not finite.
    """
    parameters = dict(model.named_parameters())
    files = find_shards(path)
    stored, scaled = pair_scales(read_headers(files), read_quantization(path, config))
    fillings, repeated = match(stored, parameters, family, config, scaled)
    total, done = sum(file.stat().st_size for file in files), 0
    reader = Reader(MappedShards(), scaled, device)
    for filled in _read(reader, sources_of(parameters, fillings), parallel=bits is None):
        assign(model, filled.name, filled.tensor, bits)
        done += filled.size
        on_progress(done, total)
    on_progress(total, total)
    if repeated:
        table = next(stored for stored, pieces in fillings if pieces[0].parameter == family.embedding)
        reader.check_tied(repeated, table, parameters[family.embedding].dtype)


@dataclass(frozen=True)
class Sources:
    """An empty parameter and the parts of stored tensors that fill it."""

    name: str
    empty: nn.Parameter
    parts: list[tuple[StoredTensor, Piece]]


@dataclass(frozen=True)
class ReadParameter:
    """A parameter's values, as read from the files."""

    name: str
    tensor: Tensor
    size: int  # bytes in the files


def sources_of(parameters: Mapping[str, nn.Parameter], fillings: list[Filling]) -> list[Sources]:
    """Return the sources of all parameters, in the order of the model."""
    parts = defaultdict(list)
    for stored, pieces in fillings:
        for piece in pieces:
            parts[piece.parameter].append((stored, piece))
    return [Sources(name, empty, parts[name]) for name, empty in parameters.items()]


def _read(reader: "Reader", sources: list[Sources], parallel: bool) -> Iterator["ReadParameter"]:
    """Read the parameters in parallel, or one by one if they are quantized: then only one is in memory unquantized."""
    return in_threads(reader.read, sources, THREADS) if parallel else map(reader.read, sources)


@dataclass(frozen=True)
class Reader:
    """A reader of parameters from files."""

    shards: MappedShards
    scaled: Mapping[str, Scaled]
    device: torch.device

    def read(self, sources: Sources) -> ReadParameter:
        """Read a parameter from its sources. Raises ModelError if a value is not finite."""
        empty = sources.empty
        parameter, size = torch.empty(empty.shape, dtype=empty.dtype, device=self.device), 0
        for stored, piece in sources.parts:
            part = piece.place(parameter)
            part.copy_(piece.take(self._values(stored, empty.dtype)))
            self.shards.release(stored)
            check_finite(stored.name, part)
            size += stored.bytes_of(part.numel())
        return ReadParameter(sources.name, parameter, size)

    def check_tied(self, head: StoredTensor, table: StoredTensor, dtype: torch.dtype) -> None:
        """Raise ModelError unless a tied model's stored head equals its embedding table."""
        rows = (torch.split(self._values(stored, dtype), ROWS_COMPARED) for stored in (head, table))
        if not all(torch.equal(first.to(dtype), second.to(dtype)) for first, second in zip(*rows, strict=True)):
            raise ModelError(f"config.json sets tie_word_embeddings, but {head.name} differs from {table.name}")

    def _values(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a stored tensor's values: a view of the file, or dequantized values if the tensor has a scale."""
        values, pair = self.shards.view(stored), self.scaled.get(stored.name)
        return values if pair is None else dequantize(values, self.shards.view(pair.scale), pair.block, dtype)


def check_finite(name: str, weights: Tensor) -> None:
    """Raise ModelError if a weight is NaN or infinite."""
    # aminmax propagates NaN and runs at memory speed; isfinite takes 20 times as long.
    low, high = weights.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(f"{name} holds NaN or infinity")


def assign(model: nn.Module, name: str, tensor: Tensor, bits: int | None) -> None:
    """Set a parameter of the model. If `bits` is given, the weight of a projection is quantized at once."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    if bits is not None and isinstance(owner, PACKED) and (leaf == "weight" or isinstance(owner, Experts)):
        owner.pack(bits)
