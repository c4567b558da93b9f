"""A head for multi-token prediction with random weights, for checkpoints of Qwen3.5."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def with_head(checkpoint: Path, config: dict[str, Any]) -> Path:
    """Return a copy of a checkpoint, in a folder next to it, to which a head is added. Raises ValueError for others.

    config: the values of its config.json.
    """
    if config["model_type"] != "qwen3_5_text":
        raise ValueError(f"heads are written for dense models of Qwen3.5 only, not for {config['model_type']}")
    folder = checkpoint.with_name(f"{checkpoint.name}-mtp")
    if not folder.exists():
        shutil.copytree(checkpoint, folder)
        generator, held = torch.Generator().manual_seed(0), load_file(folder / "model.safetensors")
        dtype = next(iter(held.values())).dtype
        for name, shape in shapes_of(config).items():
            weight = (
                torch.zeros(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            )
            held[f"mtp.{name}.weight"] = weight.to(dtype)
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's weights, by their names between `mtp.` and `.weight`."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    norms = "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    layer, attention = "layers.0", "layers.0.self_attn"
    return {
        **dict.fromkeys(norms, (hidden,)),
        "fc": (hidden, 2 * hidden),
        f"{layer}.input_layernorm": (hidden,),
        f"{layer}.post_attention_layernorm": (hidden,),
        f"{attention}.q_proj": (2 * query, hidden),
        f"{attention}.k_proj": (keys, hidden),
        f"{attention}.v_proj": (keys, hidden),
        f"{attention}.o_proj": (hidden, query),
        f"{attention}.q_norm": (width,),
        f"{attention}.k_norm": (width,),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
    }
