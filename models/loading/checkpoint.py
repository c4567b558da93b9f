"""From a checkpoint folder to a model."""

import json
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models import granitemoehybrid, mamba2, nemotron_h
from models.batch import Model
from models.config import ModelConfig, ModelError, read_config
from models.family import Family
from models.hash import HashModel
from models.layers.linear import Embedding, Linear

FAMILIES: dict[str, Family] = {
    "mamba2": mamba2.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "hash": Family(
        build=lambda config, *dtypes: HashModel.from_config(config.values), rename=lambda name: name, embedding=""
    ),
}
Progress = Callable[[int, int], None]
HEAD = "lm_head.weight"
READABLE = ("F32", "BF16", "F16", "F64")


def load_model(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    on_progress: Progress | None = None,
    before_packing: Callable[[], None] = lambda: None,
    state_dtype: torch.dtype = torch.float32,
    bits: int | None = None,
) -> Model:
    """Load config.json and the safetensors shards of the folder `path`.

    dtype: of the weights, float32 or bfloat16; None takes the checkpoint's. on_progress(done, total) counts bytes.
    before_packing: called before weights are laid out for the kernels that there are, after reading if bits is None.
    state_dtype: in which recurrent states are kept, float32 or bfloat16.
    bits: 8 or 4 make integers of each projection's weights as it is read: no more room is taken than the result needs
    and one tensor.
    Raises ModelError for a folder that is none, a family, quantization or setting that is not supported, and for
    tensors that are missing, surplus, misshapen or not finite.
    """
    check_folder(path)
    config = read_config(path)
    family = find_family(config)
    model = _build(family, config, dtype or config.dtype(), state_dtype)
    if bits is not None:
        before_packing()
    if isinstance(model, nn.Module):
        _fill(model, family, path, device, on_progress or (lambda done, total: None), bits)
    if bits is None:
        before_packing()
    if isinstance(model, nn.Module) and bits is None:
        _pack(model)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # Else what packing took for a while counts as taken when pools are sized.
    return model


def random_model(
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    state_dtype: torch.dtype = torch.float32,
    bits: int | None = None,
) -> Model:
    """A model of this config.json with random weights of the usual sizes; state_dtype, bits: see load_model."""
    model = _build(find_family(ModelConfig(config)), ModelConfig(config), dtype, state_dtype)
    if isinstance(model, nn.Module):
        generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        for name, parameter in list(model.named_parameters()):
            _assign(model, name, _random(name, parameter.shape, generator).to(device, parameter.dtype), bits)
        if bits is None:
            _pack(model)
    return model


def check_folder(path: Path) -> None:
    """ModelError unless `path` is a folder; tells a hub id from a mistyped path."""
    if path.is_dir():
        return
    if len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", ".."):
        raise ModelError(
            f"{path} is not a folder. If it is the id of a model on the hub, download it first "
            f"(hf download {path} --local-dir {path.name}) and pass that folder."
        )
    raise ModelError(f"{path} is not a folder with a checkpoint")


def find_family(config: ModelConfig) -> Family:
    """The family of config.json's model_type; ModelError if it is not supported, or the weights are quantized."""
    name = config.values.get("model_type")
    if name not in FAMILIES:
        known = ", ".join(family for family in FAMILIES if family != "hash")
        raise ModelError(f"model_type {name!r} is not supported (supported: {known})")
    quantization = config.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"quantization_config {method!r} is not supported: only float32 and bfloat16 weights are")
    return FAMILIES[name]


def _build(family: Family, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Model:
    with torch.device("meta"):
        return family.build(config, dtype, state_dtype)


def _fill(model: nn.Module, family: Family, path: Path, device: torch.device, tell: Progress, bits: int | None) -> None:
    files, parameters = find_shards(path), dict(model.named_parameters())
    targets = _match(files, parameters, family)
    total, done = sum(file.stat().st_size for file in files), 0
    for source, tensor in _tensors(files, targets):
        target = targets[source]
        if target in parameters:
            _assign(model, target, _finite(source, tensor.to(device, parameters[target].dtype, copy=True)), bits)
        done += tensor.nbytes
        tell(done, total)
    tell(total, total)
    if HEAD in targets.values() and HEAD not in parameters:
        _check_tied(files, targets, family.embedding, parameters[family.embedding].dtype)


def find_shards(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; ModelError if there are none, or some of an index are missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(path / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} has no usable weight_map: {error!r}") from None
        outside = sorted(name for name in names if Path(name).is_absolute() or ".." in Path(name).parts)
        if outside:
            raise ModelError(f"{index} points outside its folder: {_listed(outside)}")
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{path} lacks the shards {_listed(absent)}")
    if not files:
        raise ModelError(f"{path} holds no safetensors files, the only weights that are read")
    return files


def _match(files: list[Path], parameters: dict[str, nn.Parameter], family: Family) -> dict[str, str]:
    """Checkpoint tensor → parameter, for those that are not left out; ModelError naming all that do not fit."""
    targets: dict[str, str] = {}
    surplus, misshapen, unreadable = list[str](), list[str](), list[str]()
    for source, shape, dtype in _headers(files):
        target = family.rename(source)
        if target is None:
            continue
        # A tied model's file may repeat the embedding as its head.
        parameter = parameters.get(family.embedding if target == HEAD and HEAD not in parameters else target)
        if parameter is None:
            surplus.append(source)
            continue
        if list(parameter.shape) != shape:
            misshapen.append(f"{source} {shape}, expected {list(parameter.shape)}")
        if dtype not in READABLE:
            unreadable.append(f"{source} ({dtype})")
        targets[source] = target
    missing = sorted(parameters.keys() - targets.values())
    faults = {
        "unsupported dtypes": unreadable,
        "surplus tensors": surplus,
        "missing tensors": missing,
        "wrong shapes": misshapen,
    }
    if any(faults.values()):
        told = "; ".join(f"{what}: {_listed(names)}" for what, names in faults.items() if names)
        raise ModelError(f"{files[0].parent} does not fit its config.json: {told}")
    return targets


def _finite(name: str, weights: Tensor) -> Tensor:
    # aminmax lets NaN through, and reads as fast as memory does: isfinite takes 20 times as long.
    low, high = weights.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(f"{name} holds NaN or infinity")
    return weights


def _check_tied(files: list[Path], targets: dict[str, str], embedding: str, dtype: torch.dtype) -> None:
    sources = {target: source for source, target in targets.items()}
    head, table = (next(tensor for _, tensor in _tensors(files, {sources[name]})) for name in (HEAD, embedding))
    if not torch.equal(head.to(dtype), table.to(dtype)):
        raise ModelError(f"config.json ties the embeddings, but {sources[HEAD]} differs from them")


def _headers(files: list[Path]) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and safetensors dtype of every tensor."""
    for file in files:
        with _opened(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                part = shard.get_slice(name)
                yield name, part.get_shape(), part.get_dtype()


def _tensors(files: list[Path], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with _opened(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if name in names:
                    yield name, shard.get_tensor(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}") from None


def _assign(model: nn.Module, name: str, tensor: Tensor, bits: int | None) -> None:
    """bits: if not None, a projection's weight becomes integers at once."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    if bits is not None and leaf == "weight" and isinstance(owner, Linear | Embedding):
        owner.pack(bits)


def _pack(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.pack()


def _listed(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Of the sizes that Mamba-2 is initialised with, so that states neither vanish nor grow."""
    leaf, empty = name.rpartition(".")[2], torch.empty(shape, device=generator.device)
    if leaf == "A_log":
        return empty.uniform_(1, 16, generator=generator).log()
    if leaf == "dt_bias":
        dt = empty.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
        return dt + torch.log(-torch.expm1(-dt))
    if leaf == "bias":
        return empty.zero_()
    if len(shape) == 1:
        return empty.fill_(1)
    return empty.normal_(0, shape[-1] ** -0.5, generator=generator)
