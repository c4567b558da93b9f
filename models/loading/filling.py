"""Filling of a model's parameters from the tensors of a checkpoint."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from baton.kernels.linear import quantized
from baton.kernels.linear.quantized import Groups
from baton.kernels.moe.experts import PackedExperts
from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, Piece
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.linear import Embedding, HeadLinear, Linear
from baton.models.loading.formats.composed import Composed, MixedGroups
from baton.models.loading.kept import Kept, Part, keep_weight
from baton.models.loading.matching import Filling, match
from baton.models.loading.parallel import in_threads
from baton.models.loading.quantization import compose, read_quantization
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
    at_once: bool,
) -> None:
    """Fill the model's empty parameters from the folder or GGUF file `path`.

    on_progress, bits: see load_model.
    at_once: whether a weight is packed as soon as it is read. Only then can integers of the files stay integers.
    Raises ModelError for tensors that are missing, surplus, misshapen or not finite.
    """
    parameters = dict(model.named_parameters())
    files = find_shards(path)
    stored = compose(read_headers(files), read_quantization(path, config))
    fillings, repeated = match(stored, parameters, family, config)
    total, done = sum(file.stat().st_size for file in files), 0
    reader = Reader(MappedShards(), device, keeps=at_once and bits is None)
    for filled in _read(reader, sources_of(model, fillings), parallel=not at_once):
        assign(model, filled.name, filled.value, bits, at_once)
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
    owner: nn.Module  # the layer that has the parameter
    empty: nn.Parameter
    parts: list[Part]


@dataclass(frozen=True)
class ReadParameter:
    """A parameter's values, as read from the files."""

    name: str
    value: Tensor | Kept
    size: int  # bytes in the files


def sources_of(model: nn.Module, fillings: list[Filling]) -> list[Sources]:
    """Return the sources of all parameters, in the order of the model."""
    parts = parts_of(fillings)
    return [
        Sources(name, model.get_submodule(name.rpartition(".")[0]), empty, parts[name])
        for name, empty in model.named_parameters()
    ]


def parts_of(fillings: list[Filling]) -> dict[str, list[Part]]:
    """Return the parts that fill each parameter."""
    parts = defaultdict[str, list[Part]](list)
    for stored, pieces in fillings:
        for piece in pieces:
            parts[piece.parameter].append((stored, piece))
    return parts


def _read(reader: "Reader", sources: list[Sources], parallel: bool) -> Iterator["ReadParameter"]:
    """Read parameters in threads; if each is packed at once, one by one, so that only one is in memory unpacked."""
    return in_threads(reader.read, sources, THREADS) if parallel else map(reader.read, sources)


@dataclass(frozen=True)
class Reader:
    """A reader of parameters from files."""

    shards: MappedShards
    device: torch.device
    keeps: bool  # whether a quantized weight may keep the file's integers, instead of being dequantized

    def read(self, sources: Sources) -> ReadParameter:
        """Read a parameter from its sources. Raises ModelError if a value is not finite."""
        empty = sources.empty
        size = sum(stored.bytes_of(piece.place(empty).numel()) for stored, piece in sources.parts)
        if self.keeps and quantized.keeps(empty.dtype, self.device) and (weight := self._kept(sources)):
            return ReadParameter(sources.name, weight, size)
        parameter = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        for stored, piece in sources.parts:
            self._copy(stored, piece, piece.place(parameter))
        return ReadParameter(sources.name, parameter, size)

    def _kept(self, sources: Sources) -> Kept | None:
        """Return the weight with the file's integers; None if the file has none, or none that can stay as they are."""
        try:
            return keep_weight(sources.owner, sources.name, sources.empty, sources.parts, self._groups, self._floats)
        except MixedGroups:
            return None

    def _groups(self, stored: StoredTensor, rows: slice) -> Groups:
        """Return the integers and scales of rows of a stored tensor. Raises ModelError if a scale is not finite.

        rows: which rows; all of them if the tensor is composed.
        """
        groups = stored.groups(self.shards.view) if isinstance(stored, Composed) else self.shards.groups(stored, rows)
        for scales in (groups.scales, groups.minima):
            if scales is not None:
                check_finite(stored.name, scales)
        self._release(stored)
        return groups

    def _floats(self, part: Part, empty: Tensor) -> Tensor:
        """Return the values of a part of a stored tensor, in the shape and dtype of `empty`."""
        values = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        self._copy(*part, values)
        return values

    def _copy(self, stored: StoredTensor, piece: Piece, to: Tensor) -> None:
        """Copy the part of a stored tensor that a piece takes. Raises ModelError if a value is not finite."""
        to.copy_(piece.take(self._values(stored, to.dtype)))
        self._release(stored)
        check_finite(stored.name, to)

    def check_tied(self, head: StoredTensor, table: StoredTensor, dtype: torch.dtype) -> None:
        """Raise ModelError unless a tied model's stored head equals its embedding table."""
        rows = (torch.split(self._values(stored, dtype), ROWS_COMPARED) for stored in (head, table))
        if not all(torch.equal(first.to(dtype), second.to(dtype)) for first, second in zip(*rows, strict=True)):
            raise ModelError(f"config.json sets tie_word_embeddings, but {head.name} differs from {table.name}")

    def _values(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a stored tensor's values: a view of the file, or values of `dtype` that several tensors compose."""
        return stored.values(self.shards.view, dtype) if isinstance(stored, Composed) else self.shards.view(stored)

    def _release(self, stored: StoredTensor) -> None:
        for each in stored.stored():
            self.shards.release(each)


def check_finite(name: str, weights: Tensor) -> None:
    """Raise ModelError if a weight is NaN or infinite."""
    # aminmax propagates NaN and runs at memory speed; isfinite takes 20 times as long.
    low, high = weights.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(f"{name} holds NaN or infinity")


def assign(model: nn.Module, name: str, value: Tensor | Kept, bits: int | None, at_once: bool) -> None:
    """Set a parameter of the model. If `at_once`, a weight is packed, and quantized if `bits` is given."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(value, PackedExperts):
        assert isinstance(owner, Experts)
        owner.keep(leaf, value)
    elif not isinstance(value, Tensor):
        assert isinstance(owner, Linear | Embedding)
        owner.keep(value)
    else:
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
        if at_once and isinstance(owner, PACKED) and (leaf == "weight" or isinstance(owner, Experts)):
            owner.pack(bits)
