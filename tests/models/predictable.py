"""A small Qwen3.5 whose head for multi-token prediction is mostly right.

The model's blocks add little to the embeddings, so its next token depends almost only on the last token. The head's
blocks add nothing, so its prediction depends only on the token, and is the same in most cases.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.configurations.qwen import Shape, apart

LITTLE = 0.1
ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def write_predictable(folder: Path, vocabulary: int, layers: int = 4, hidden: int = 64, little: float = LITTLE) -> Path:
    """Write config.json and weights in float32 into a folder, and return it.

    little: scale of what the model's blocks add to the residual stream. The larger, the less a token alone decides.
    """
    shape = Shape(hidden, layers, 1, 1, 16, vocabulary, mlp=2 * hidden)
    config = shape.config() | {"model_type": "qwen3_5_text", "dtype": "float32", "mtp_num_hidden_layers": 1}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    (folder / "config.json").write_text(json.dumps(config))
    head = {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head |= {f"mtp.layers.0.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    head |= shape.attention("mtp.layers.0.self_attn") | shape.gated("mtp.layers.0.mlp", shape.mlp)
    g = torch.Generator().manual_seed(0)
    shapes = shape.tensors("model", apart, stacked=True) | head
    tensors = {name: _drawn(name, size, g, little) for name, size in shapes.items()}
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _drawn(name: str, shape: tuple[int, ...], g: torch.Generator, little: float) -> Tensor:
    """Return a weight: random, or what makes a norm, a decay or an addition neither vanish nor grow."""
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=g).log()
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.zeros(shape)
    scale = 1.0 if "embed" in name else 3.0 if "lm_head" in name else little if name.endswith(ADDING) else 1.0
    scale = 0.0 if name.startswith("mtp.") and name.endswith(ADDING) else scale
    return torch.randn(shape, generator=g) * scale * (1.0 if "embed" in name else shape[-1] ** -0.5)
