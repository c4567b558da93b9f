"""Bamba (transformers' BambaForCausalLM): Mamba-2 with a few attention layers, each layer with a gated MLP."""

import torch

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import RENAMED_KINDS, Block, Decoder, Outline, numbered
from baton.models.family import Family, Piece, gated_mlp
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation

EPS = 1e-5
ROTATED = 0.5  # the default share of a head's numbers that is rotated


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    kinds = read_layers(config)
    mamba = Mamba2Settings.from_config(config, state_dtype, eps=EPS)
    attention = AttentionSettings.from_config(config)
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=262144),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        rings=[mamba.ring_spec(dtype)] * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * kinds.count("attention"),
        rotate=[read_rotation(config, attention.head_dim, ROTATED).of],
    )

    def norm() -> RMSNorm:
        return RMSNorm(mamba.hidden, mamba.eps, dtype)

    def block(kind: str, index: int) -> Block:
        is_mamba = kind == "mamba"
        mixer = Mamba2Mixer(mamba, index, dtype) if is_mamba else Attention(attention, index, dtype)
        bias = config.flag("mlp_bias", default=False)
        mlp = GatedMLP(mamba.hidden, config.integer("intermediate_size"), dtype, bias)
        named_mixer = {"mamba" if is_mamba else "self_attn": mixer}
        return Block(input_layernorm=norm(), **named_mixer, pre_ff_layernorm=norm(), feed_forward=mlp)

    blocks = [block(kind, index) for kind, index in numbered(kinds)]
    return Decoder(config, outline, blocks, norm(), dtype, parts=("embed_tokens", "layers", "final_layernorm"))


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: mamba or attention.

    attn_layer_indices decides; a list of the kinds, which no known file has, must agree with it.
    """
    layers = config.integer("num_hidden_layers")
    attending = config.indices("attn_layer_indices", layers)
    kinds = ["attention" if layer in attending else "mamba" for layer in range(layers)]
    names = config.strings("layer_types", "layers_block_type")
    if names is not None and [RENAMED_KINDS.get(name, name) for name in names] != kinds:
        raise ModelError("config.json: attn_layer_indices and the list of layers name different layers")
    return kinds


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    return gated_mlp(name) or [Piece(name)]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
