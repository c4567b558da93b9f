"""The measured models: random weights from a seed, written as checkpoints that every contender can read."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn

from baton.kernels.linear.compressed import CompressedWeight
from baton.kernels.linear.dense import PackedWeight
from baton.models.config import ModelConfig
from baton.models.family import Piece
from baton.models.layers.linear import Embedding, Linear
from baton.models.loading.checkpoint import find_family, random_model
from scripts.benchmarks.common.configs import (
    BAILING_HYBRID,
    BAMBA,
    FALCON_H1,
    GRANITE,
    GRANITE_MOE,
    KIMI_LINEAR,
    LFM2,
    LFM2_354M,
    LFM3,
    MAMBA2,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_NEXT,
)
from scripts.benchmarks.peers.environments import how_to_install, python_of
from scripts.benchmarks.peers.process import HERE
from scripts.launch import ROOT

SEED = 0
# Families whose parameters can have the names of the tensors in checkpoint files (see holds_files_tensors).
PLAIN = ("mamba2", "granitemoehybrid")
# A tiny model, which shows that a benchmark runs; speeds measured with it mean nothing.
TINY = MAMBA2 | {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "state_size": 16}
# A model whose forward pass is arithmetic on one number per row, so that only the actors and HTTP take time.
NULL: dict[str, Any] = {
    "model_type": "hash",
    "vocab_size": 50288,
    "chunk_size": 64,
    "max_position_embeddings": 1 << 20,
    "page_fold": False,
}
BUNDLED = ROOT / "models" / "bundled"
SHAPES = {
    "mamba2-129m": MAMBA2,
    "granite-151m": GRANITE,
    "granite-moe-153m": GRANITE_MOE,
    "nemotron_h-161m": NEMOTRON_H,
    "nemotron_h-moe-162m": NEMOTRON_H_MOE,
    "bamba-151m": BAMBA,
    "falcon_h1-145m": FALCON_H1,
    "qwen3_next-152m": QWEN3_NEXT,
    "qwen3_5-161m": QWEN3_5,
    "kimi_linear-153m": KIMI_LINEAR,
    "lfm2-149m": LFM2,
    "lfm2-354m": LFM2_354M,
    "lfm3-147m": LFM3,
    "olmo_hybrid-146m": OLMO_HYBRID,
    "bailing_hybrid-159m": BAILING_HYBRID,
    "tiny": TINY,
    "null": NULL,
}


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of "bundled" or of a model named in SHAPES.

    layers: if given, the model has only this many layers; the last layer of a hybrid then has attention.
    """
    if shape == "bundled":
        return dict(json.loads((BUNDLED / "config.json").read_text()))
    config = dict(SHAPES[shape])
    if layers is None or "num_hidden_layers" not in config:
        return config
    if "hybrid_override_pattern" in config:
        config["hybrid_override_pattern"] = "M" * (layers - 1) + "*"
    if "layer_types" in config:
        is_lfm = config["model_type"] in ("lfm2", "lfm3")
        recurrent, attending = ("conv", "full_attention") if is_lfm else ("mamba", "attention")
        config["layer_types"] = [*[recurrent] * (layers - 1), attending]
    if "attn_layer_indices" in config:
        config["attn_layer_indices"] = [layers - 1]
    if "linear_attn_config" in config:
        kinds = {"kda_layers": [*range(1, layers)], "full_attn_layers": [layers]}
        config["linear_attn_config"] = config["linear_attn_config"] | kinds
    return config | {"num_hidden_layers": layers}


def checkpoint_of(config: dict[str, Any], folder: Path) -> Path:
    """Return the checkpoint folder of a config, after writing it if it is missing.

    folder: the parent folder; each config has its own checkpoint folder in it.
    """
    if config == config_of("bundled"):
        return BUNDLED
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{config['model_type']}-{digest}"
    make_checkpoint(path, config)
    return path


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and a tokenizer, unless the folder has them already.

    Only transformers can write the files of some families. Raises RuntimeError if transformers is needed but missing.
    """
    text = json.dumps(config, indent=1)
    file = folder / "config.json"
    # The tokenizer is written last, so a folder that has a tokenizer is complete.
    if (folder / "tokenizer.json").is_file() and file.is_file() and file.read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    model = random_model(config, dtype, torch.device("cpu"), SEED)
    if isinstance(model, nn.Module) and holds_files_tensors(model, config):
        save_file(plain_weights(model), folder / "model.safetensors", {"format": "pt"})
    elif isinstance(model, nn.Module):
        write_by_transformers(folder)
    write_tokenizer(folder, config["vocab_size"])


def holds_files_tensors(model: nn.Module, config: dict[str, Any]) -> bool:
    """Return whether each parameter is one tensor of the family's checkpoint files, neither joined nor changed."""
    parsed = ModelConfig(config)
    pieces = find_family(parsed).pieces
    return config["model_type"] in PLAIN and all(
        pieces(name, parsed) == [Piece(name)] for name, _ in model.named_parameters()
    )


def write_by_transformers(folder: Path) -> None:
    python = python_of("transformers")
    if python is None:
        raise RuntimeError(how_to_install("transformers"))
    script = HERE / "write_checkpoint.py"
    done = subprocess.run([python, str(script), str(folder), str(SEED)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script.name} failed:\n{done.stderr[-2000:]}")


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return weights by name in a checkpoint's layout; weights that were packed for this CPU are unpacked."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear | Embedding) and layer.packed:
            assert isinstance(layer.packed, PackedWeight | CompressedWeight)  # nothing is quantized
            weights[f"{name}.weight"] = layer.packed.plain()
    return weights


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose words are t0, t1, ...; word t5 is token 5."""
    words = {f"t{id}": id for id in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
