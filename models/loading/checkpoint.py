"""Loading of a model from a checkpoint folder: the supported families, and the order of the steps of loading."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baton.models.batch import Model
from baton.models.config import ModelConfig, ModelError
from baton.models.families import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    lfm3,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from baton.models.family import Family, Piece, is_of_head
from baton.models.gguf.header import SUFFIX
from baton.models.hash import HashModel
from baton.models.loading import heads
from baton.models.loading.architectures.translation import translated
from baton.models.loading.dtype import checkpoint_dtype
from baton.models.loading.filling import PACKED, Progress, assign, fill, parts_of
from baton.models.loading.kept import bytes_saved_by_keeping
from baton.models.loading.matching import match
from baton.models.loading.quantization import compose, read_quantization
from baton.models.loading.shards import StoredTensor, find_shards, read_headers
from baton.models.loading.source import check_source, read_source_config

FAMILIES: dict[str, Family] = {
    "mamba2": mamba2.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "bamba": bamba.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "olmo_hybrid": olmo_hybrid.FAMILY,
    "bailing_hybrid": bailing_hybrid.FAMILY,
    "lfm2": lfm2.FAMILY,
    "lfm2_moe": lfm2.FAMILY,
    "lfm3": lfm3.FAMILY,
    "hash": Family(
        build=lambda config, *dtypes: HashModel.from_config(config.values),
        pieces=lambda name, config: [Piece(name)],
        embedding="",
    ),
}


def load_model(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    on_progress: Progress | None = None,
    on_built: Callable[[Model], None] = lambda model: None,
    before_packing: Callable[[], None] = lambda: None,
    state_dtype: torch.dtype = torch.float32,
    bits: int | None = None,
    on_headless: Callable[[ModelError], None] | None = None,
) -> Model:
    """Load the model in the folder or GGUF file `path`: its configuration and its weights.

    dtype: the dtype of the weights, float32 or bfloat16; None for the checkpoint's own.
    on_progress: called with (bytes read, bytes in total).
    on_built: called with the model before any weight is read.
    before_packing: called before weights are packed into the layout of the available kernels. That is after all weights
        have been read; or, if `bits` is given or may_keep_integers returns True, before any is read.
    state_dtype: the dtype in which recurrent states are stored, float32 or bfloat16.
    bits: 8 or 4 quantizes each projection's weight to integers when it is read, so that loading needs no more memory
        than the result and one tensor; None does not quantize, and what the files have as integers stays so if
        native code computes and the integers have a form in memory.
    on_headless: if given, the head for multi-token prediction is loaded too; called with the error of with_head if
        it cannot be.
    Raises ModelError if `path` is neither, if a family, quantization or setting is not supported, and if tensors
    are missing, surplus, misshapen or not finite.
    """
    check_source(path)
    config = read_source_config(path)
    family = find_family(config)
    if on_headless is not None:
        try:
            config = heads.with_head(read_stored(path, config) if family.can_have_head else [], config, family)
        except ModelError as error:
            on_headless(error)
    model = build_model(family, config, dtype or checkpoint_dtype(path, config), state_dtype)
    on_built(model)
    at_once = bits is not None or may_keep_integers(path, device)
    if at_once:
        before_packing()
    if isinstance(model, nn.Module):
        fill(model, family, config, path, device, on_progress or (lambda done, total: None), bits, at_once)
    if not at_once:
        before_packing()
        if isinstance(model, nn.Module):
            _pack(model)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # Otherwise packing's temporary memory counts as used when the pools are sized.
    return model


def read_stored(path: Path, config: ModelConfig) -> list[StoredTensor]:
    """Return the tensors of the files by their headers, with weights in place of the tensors that compose them."""
    return compose(read_headers(find_shards(path)), read_quantization(path, config))


def may_keep_integers(path: Path, device: torch.device) -> bool:
    """Return whether integers of the files may stay integers if native code computes. Headers are not read.

    Raises ModelError if `path` is no checkpoint, or for a quantization that is not supported.
    """
    check_source(path)
    if device.type != "cpu" or path.suffix == SUFFIX:
        return device.type == "cpu"
    quantization = read_quantization(path, read_source_config(path))
    return quantization is not None and quantization.may_keep


def saved_by_file(path: Path, model: nn.Module) -> int:
    """Return how many bytes a model takes less than its parameters if the integers of its files stay integers."""
    config, parameters = read_source_config(path), dict(model.named_parameters())
    if any(map(is_of_head, parameters)):
        config = config.with_head()
    fillings, _ = match(read_stored(path, config), parameters, find_family(config), config)
    return bytes_saved_by_keeping(model, parts_of(fillings))


def random_model(
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    state_dtype: torch.dtype = torch.float32,
    bits: int | None = None,
    with_head: bool = False,
) -> Model:
    """Build a model with random weights from the values of a config.json, for tests and benchmarks.

    state_dtype, bits: see load_model. with_head: build a head for multi-token prediction too.
    """
    values = ModelConfig(config, with_head)
    model = build_model(find_family(values), values, dtype, state_dtype)
    if isinstance(model, nn.Module):
        generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        for name, parameter in list(model.named_parameters()):
            assign(
                model,
                name,
                _random(name, parameter.shape, generator).to(device, parameter.dtype),
                bits,
                bits is not None,
            )
        if bits is None:
            _pack(model)
    return model


def find_family(config: ModelConfig) -> Family:
    """Return the family of a configuration's model_type. Raises ModelError if Baton does not support it.

    A bidirectional model of a supported type is refused too, and one that is too deep.
    """
    name = config.values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(family for family in FAMILIES if family != "hash")
        raise ModelError(f"model_type {name!r} is not supported (supported: {known})")
    config.check_causal()
    config.check_depth()
    return translated(FAMILIES[name], config)


def build_model(family: Family, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Model:
    """Build the model without weights, on the meta device.

    Raises ModelError for a setting that is not supported, for keys that disagree on the number of layers, and for a
    model without a recurrent state.
    """
    config.check_layers()
    with torch.device("meta"):
        model = family.build(config, dtype, state_dtype)
    if not model.state_specs():
        raise ModelError("config.json: no layer has a recurrent state; Baton serves models that have one")
    return model


def _pack(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PACKED):
            module.pack()


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return random values as in Mamba-2's initialisation, so that states neither vanish nor grow."""
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
