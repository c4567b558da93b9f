"""The models that are measured: random weights from a seed, written as a checkpoint that every contender can read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn

from models.layers.linear import Embedding, Linear
from models.loading.checkpoint import random_model

SEED = 0
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "torch_dtype": "bfloat16",
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "torch_dtype": "bfloat16",
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 7 + ["attention"] + ["mamba"] * 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "attention_multiplier": 0.125,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1536,
    "intermediate_size": 1536,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "torch_dtype": "bfloat16",
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "attn_layer_indices": [5, 13],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_chunk_size": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "torch_dtype": "bfloat16",
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_chunk_size": 64,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# To see that a benchmark runs, not how fast anything is.
TINY = MAMBA2 | {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "state_size": 16}
# A model whose forward is arithmetic on one number a row: what is left of a step is the relay.
NULL: dict[str, Any] = {
    "model_type": "hash",
    "vocab_size": 50288,
    "chunk_size": 64,
    "max_position_embeddings": 1 << 20,
    "page_fold": False,
}
BUNDLED = Path(__file__).resolve().parents[2] / "models" / "bundled"
SHAPES = {
    "mamba2-129m": MAMBA2,
    "granite-151m": GRANITE,
    "bamba-151m": BAMBA,
    "falcon_h1-145m": FALCON_H1,
    "tiny": TINY,
    "null": NULL,
}


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a shape; with `layers` layers if that is given, of a hybrid's the last with attention."""
    if shape == "bundled":
        return dict(json.loads((BUNDLED / "config.json").read_text()))
    config = dict(SHAPES[shape])
    if layers is None or "num_hidden_layers" not in config:
        return config
    if "layer_types" in config:
        config["layer_types"] = [*["mamba"] * (layers - 1), "attention"]
    if "attn_layer_indices" in config:
        config["attn_layer_indices"] = [layers - 1]
    return config | {"num_hidden_layers": layers}


def checkpoint_of(config: dict[str, Any], folder: Path) -> Path:
    """The bundled model's, or one in a folder of its own, so that none is taken for another."""
    if config == config_of("bundled"):
        return BUNDLED
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{config['model_type']}-{digest}"
    make_checkpoint(path, config)
    return path


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """config.json, model.safetensors and a tokenizer; left alone if the folder has them already."""
    text = json.dumps(config, indent=1)
    written = folder / "config.json"
    if written.is_file() and written.read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    model = random_model(config, dtype, torch.device("cpu"), SEED)
    if isinstance(model, nn.Module):
        save_file(plain_weights(model), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    written.write_text(text)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """By name, in a checkpoint's layout, also those that were packed for this CPU."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear | Embedding) and layer.packed:
            weights[f"{name}.weight"] = layer.packed.plain()
    return weights


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Its words are t0, t1, ...; each stands for the token of its number."""
    words = {f"t{id}": id for id in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
