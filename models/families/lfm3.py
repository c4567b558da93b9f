"""LFM3 (transformers' Lfm3ForCausalLM): LFM2 with sliding windows, norms around mixers and MLPs, and gated heads.

Keys and values before a layer's window are kept in their pages, because the prefixes in the cache share pages of all
layers. A window therefore saves time, but no memory.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, SandwichBlock, checked_kinds, numbered
from baton.models.family import Family, Piece, gated_mlp
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import RotationSettings
from baton.models.layers.short_conv import ShortConv, ShortConvSettings

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
ATTENDING = ("full_attention", "sliding_attention")
"""The kinds of layers with attention, in the order of the model's rotations."""
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 7680,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor"}


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    """Build the model. Its states, the last inputs of convolutions, are always float32."""
    config = config.with_defaults(DEFAULTS)
    kinds, conv, eps = read_layers(config), read_conv(config), read_eps(config)
    attention = {kind: read_attention(config, kind) for kind in ATTENDING if kind in kinds}
    convolutions = kinds.count("conv")
    outline = Outline(
        max_position=config.integer("max_position_embeddings"),
        chunk_size=CHUNK,
        kernel=conv.kernel,
        states=conv.state_specs() * convolutions,
        rings=[conv.ring_spec(dtype)] * convolutions,
        pages=[spec for kind in kinds if kind in attention for spec in attention[kind].kv_specs(dtype)],
        rotate=[read_rotation(config, kind).of for kind in attention],
    )
    is_sandwich = config.flag("use_sandwich_norm", default=True)

    def norm() -> RMSNorm:
        return RMSNorm(conv.hidden, eps, dtype)

    def block(kind: str, index: int) -> nn.Module:
        mixer = (
            {"conv": ShortConv(conv, index, dtype)}
            if kind == "conv"
            else {"self_attn": Attention(attention[kind], index, dtype)}
        )
        mlp = GatedMLP(conv.hidden, config.integer("intermediate_size"), dtype)
        if not is_sandwich:
            return Block(operator_norm=norm(), **mixer, ffn_norm=norm(), feed_forward=mlp)
        first, second = {"post_operator_norm": norm(), "ffn_norm": norm()}, {"post_ffn_norm": norm()}
        return SandwichBlock(operator_norm=norm(), **mixer, **first, feed_forward=mlp, **second)

    # Both kinds of attention share one numbering, because their keys and values are in one list of pages.
    numbers = numbered(["conv" if kind == "conv" else "attention" for kind in kinds])
    blocks = [block(kind, index) for kind, (_, index) in zip(kinds, numbers, strict=True)]
    return Decoder(config, outline, blocks, norm(), dtype, parts=("embed_tokens", "layers", "embedding_norm"))


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer. By default layers 2, 6, 10, … have full attention, and 4, 8, 12, … a window."""
    kinds = config.strings("layer_types")
    if kinds is None:
        pattern = ("sliding_attention", "conv", "full_attention", "conv")
        kinds = [pattern[layer % 4] if layer else "conv" for layer in range(config.integer("num_hidden_layers"))]
    return checked_kinds(kinds, "conv", *ATTENDING)


def read_eps(config: ModelConfig) -> float:
    return config.number("norm_eps", "rms_norm_eps", default=1e-5)


def read_conv(config: ModelConfig) -> ShortConvSettings:
    hidden, kernel = config.integer("hidden_size"), config.integer("conv_L_cache", default=7)
    return ShortConvSettings(hidden, kernel, config.flag("conv_bias", default=False))


def read_attention(config: ModelConfig, kind: str) -> AttentionSettings:
    """Return the settings of the layers of a kind. One gate multiplies the whole output of a head, and has no bias."""
    settings = AttentionSettings.from_config(config, norm_eps=read_eps(config), norm_offset=0.0)
    is_gated, rotation = config.flag("use_attention_gate", default=True), rotated(config).index(kind)
    window = read_window(config) if kind == "sliding_attention" else 0
    return replace(settings, gates=settings.heads if is_gated else 0, window=window, rotation=rotation)


def rotated(config: ModelConfig) -> list[str]:
    """Return the kinds of layers for which the model has a rotation, in order."""
    kinds = read_layers(config)
    return [kind for kind in ATTENDING if kind in kinds]


def read_window(config: ModelConfig) -> int:
    """Return how many positions a token attends to, its own included. A null window would mean none."""
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        raise ModelError("config.json: sliding_window should be an integer, not null")
    return config.integer("sliding_window", default=256)


def read_rotation(config: ModelConfig, kind: str) -> RotationSettings:
    """Read the rotation of the layers of a kind, which rotates only the first pairs of a head if it is partial.

    Released files call a partial rotation "default". transformers 5.23 then ignores partial_rotary_factor, but the
    models were trained with it, as with "proportional".
    """
    name, head_dim = f"rope_parameters.{kind}", config.integer("head_dim")
    if config.values.get("rope_scaling") is not None:
        raise ModelError("config.json: rope_scaling is not supported: only rope_parameters are")
    parameters: Any = config.values["rope_parameters"]
    rope = parameters.get(kind) if isinstance(parameters, dict) else None
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: {name} should be an object, not {rope!r}")
    unknown = sorted(key for key, value in rope.items() if key not in ROPE_KEYS and value is not None)
    if unknown:
        raise ModelError(f"config.json: {name}.{unknown[0]} is not supported")
    if "partial_rotary_factor" not in rope and config.values.get("partial_rotary_factor") is not None:
        raise ModelError(f"config.json: partial_rotary_factor is not supported: only {name}.partial_rotary_factor is")
    settings = ModelConfig({f"{name}.{key}": value for key, value in rope.items()})
    settings.require(f"{name}.rope_type", "default", "proportional")
    share = settings.number(f"{name}.partial_rotary_factor", default=1.0)
    if share > 1 or head_dim % 2:
        raise ModelError(
            f"config.json: {name}.partial_rotary_factor = {share} should be at most 1, and head_dim = {head_dim} even"
        )
    return RotationSettings(head_dim, settings.number(f"{name}.rope_theta"), int(share * head_dim // 2))


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills. Released files name the gate of heads gate_proj."""
    path, _, leaf = name.rpartition(".")
    owner, _, part = path.rpartition(".")
    if part in PARTS:
        return gated_mlp(f"{owner}.{PARTS[part]}_proj.{leaf}")
    if part == "g_proj":
        return [Piece(f"{owner}.gate_proj.{leaf}")]
    return [Piece(name)]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
