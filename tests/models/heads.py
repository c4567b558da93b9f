"""Heads for multi-token prediction: their stored tensors, and what they predict by the published definition.

The definition is that of DeepSeek-V3 (arXiv:2412.19437, section 2.2), with the layers and the names of vLLM's
qwen3_next_mtp.py and nemotron_h_mtp.py. It is computed for a whole sequence at once, in float64.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from baton.models.config import ModelConfig, read_config

QWEN = {
    "fc": (64, 128), "pre_fc_norm_embedding": (64,), "pre_fc_norm_hidden": (64,), "norm": (64,),
    "layers.0.input_layernorm": (64,), "layers.0.post_attention_layernorm": (64,),
    "layers.0.self_attn.q_proj": (4 * 2 * 16, 64), "layers.0.self_attn.k_proj": (32, 64),
    "layers.0.self_attn.v_proj": (32, 64), "layers.0.self_attn.o_proj": (64, 64),
    "layers.0.self_attn.q_norm": (16,), "layers.0.self_attn.k_norm": (16,),
    "layers.0.mlp.gate_proj": (96, 64), "layers.0.mlp.up_proj": (96, 64), "layers.0.mlp.down_proj": (64, 96),
}  # fmt: skip
NEMOTRON = {
    "layers.0.eh_proj": (64, 128), "layers.0.enorm": (64,), "layers.0.hnorm": (64,), "layers.0.norm": (64,),
    "layers.0.mixer.q_proj": (96, 64), "layers.0.mixer.k_proj": (48, 64), "layers.0.mixer.v_proj": (48, 64),
    "layers.0.mixer.o_proj": (64, 96), "layers.1.norm": (64,), "layers.1.final_layernorm": (64,),
    "layers.1.mixer.up_proj": (96, 64), "layers.1.mixer.down_proj": (64, 96),
}  # fmt: skip


def with_head(source: Path, target: Path, shapes: Mapping[str, tuple[int, ...]], **config: object) -> Path:
    """Return a copy of a checkpoint to which a head with random weights is added. config: further keys of its config.

    shapes: of the head's weights, by their names between `mtp.` and `.weight`.
    """
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    values.get("text_config", values).update(config)
    (target / "config.json").write_text(json.dumps(values))
    g, held = torch.Generator().manual_seed(5), load_file(target / "model.safetensors")
    for name, shape in shapes.items():
        held[f"mtp.{name}.weight"] = torch.randn(shape, generator=g) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)
    save_file(held, target / "model.safetensors")
    return target


@dataclass
class Definition:
    """A head's weights in float64, with which it predicts."""

    weights: Mapping[str, Tensor]
    config: ModelConfig
    embeddings: Tensor

    def hidden(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Return the head's hidden states, [n, size].

        hidden: [n, size], the model's hidden states at positions 0 to n - 1. tokens: the token after each of them.
        """
        embedded = self.embeddings[tokens]
        return self._qwen(embedded, hidden) if "fc" in self.weights else self._nemotron(embedded, hidden)

    def _qwen(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        first, second = (
            self._norm(x, f"pre_fc_norm_{of}", 1) for x, of in ((embedded, "embedding"), (hidden, "hidden"))
        )
        x = torch.cat([first, second], -1) @ self.weights["fc"].T
        normed = self._norm(x, "layers.0.input_layernorm", 1)
        of, width = "layers.0.self_attn", self.config.integer("head_dim")
        query, gate = (normed @ self.weights[f"{of}.q_proj"].T).unflatten(-1, (-1, 2, width)).unbind(2)
        keys, values = ((normed @ self.weights[f"{of}.{p}_proj"].T).unflatten(-1, (-1, width)) for p in "kv")
        query, keys = (self._rotated(self._norm(x, f"{of}.{p}_norm", 1)) for x, p in ((query, "q"), (keys, "k")))
        x = x + (attend(query, keys, values) * gate.sigmoid()).flatten(1) @ self.weights[f"{of}.o_proj"].T
        normed = self._norm(x, "layers.0.post_attention_layernorm", 1)
        up, gate = (normed @ self.weights[f"layers.0.mlp.{p}_proj"].T for p in ("up", "gate"))
        return self._norm(x + (F.silu(gate) * up) @ self.weights["layers.0.mlp.down_proj"].T, "norm", 1)

    def _nemotron(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined = torch.cat([self._norm(embedded, "layers.0.enorm"), self._norm(hidden, "layers.0.hnorm")], -1)
        x = joined @ self.weights["layers.0.eh_proj"].T
        normed, width = self._norm(x, "layers.0.norm"), self.config.integer("head_dim")
        heads = ((normed @ self.weights[f"layers.0.mixer.{p}_proj"].T).unflatten(-1, (-1, width)) for p in "qkv")
        x = x + attend(*heads).flatten(1) @ self.weights["layers.0.mixer.o_proj"].T
        up = self._norm(x, "layers.1.norm") @ self.weights["layers.1.mixer.up_proj"].T
        x = x + up.relu().square() @ self.weights["layers.1.mixer.down_proj"].T
        return self._norm(x, "layers.1.final_layernorm")

    def _norm(self, x: Tensor, name: str, offset: float = 0) -> Tensor:
        eps = self.config.number("rms_norm_eps", "layer_norm_epsilon", default=1e-6)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + self.weights[name])

    def _rotated(self, heads: Tensor) -> Tensor:
        """Rotate heads [n, heads, width] by their positions, from 0 on."""
        rope = self.config.values["rope_parameters"]
        size = int(heads.shape[-1] * rope["partial_rotary_factor"])
        angle = torch.arange(len(heads))[:, None, None] * rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        low, high, rest = heads.split([size // 2, size // 2, heads.shape[-1] - size], -1)
        cos, sin = angle.double().cos(), angle.double().sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return causal attention, [n, heads, width]; each head of keys and values serves several of the query."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, -torch.inf).softmax(-1), values)


def definition_of(path: Path) -> Definition:
    """Read a checkpoint's head."""
    held = load_file(path / "model.safetensors")
    weights = {n.removeprefix("mtp.").removesuffix(".weight"): w.double() for n, w in held.items() if "mtp." in n}
    [embeddings] = (w for n, w in held.items() if n.endswith(("embed_tokens.weight", "embeddings.weight")))
    return Definition(weights, read_config(path), embeddings.double())
