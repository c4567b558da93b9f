"""Bamba (transformers' BambaForCausalLM): Mamba-2 with a few attention layers, each layer with a gated MLP."""

import torch

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, numbered
from baton.models.family import Family, Piece, gated_mlp
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation

EPS = 1e-5
ROTATED = 0.5


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    kinds, vocabulary = read_layers(config), config.integer("vocab_size")
    mamba, attention = read_mamba(config, state_dtype), read_attention(config)
    hidden, tied = mamba.hidden, config.flag("tie_word_embeddings", default=False)
    outline = Outline(
        vocab_size=vocabulary,
        max_position=config.integer("max_position_embeddings", default=262144),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * kinds.count("attention"),
        rotate=read_rotation(config, attention.head_dim, ROTATED).of,
    )

    def norm() -> RMSNorm:
        return RMSNorm(hidden, mamba.eps, dtype)

    def block(kind: str, index: int) -> Block:
        """A mixer (`mamba` or `self_attn`), then an MLP."""
        is_mamba = kind == "mamba"
        mixer = Mamba2Mixer(mamba, index, dtype) if is_mamba else Attention(attention, index, dtype)
        bias = config.flag("mlp_bias", default=False)
        mlp = GatedMLP(hidden, config.integer("intermediate_size"), dtype, bias)
        mixed = {"mamba" if is_mamba else "self_attn": mixer}
        return Block(input_layernorm=norm(), **mixed, pre_ff_layernorm=norm(), feed_forward=mlp)

    return Decoder(
        outline,
        Embedding(vocabulary, hidden, tied, dtype),
        [block(kind, index) for kind, index in numbered(kinds)],
        norm(),
        None if tied else Linear(hidden, vocabulary, False, dtype),
        parts=("embed_tokens", "layers", "final_layernorm"),
    )


def read_layers(config: ModelConfig) -> list[str]:
    """The kind of each layer: mamba or attention."""
    layers = config.integer("num_hidden_layers")
    attending = config.indices("attn_layer_indices", layers)
    return ["attention" if layer in attending else "mamba" for layer in range(layers)]


def read_mamba(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads", default=128)
    inner = config.integer("mamba_expand", default=2) * hidden
    automatic = config.values.get("mamba_d_head", "auto") == "auto"
    settings = Mamba2Settings(
        hidden=hidden,
        heads=heads,
        width=inner // heads if automatic else config.integer("mamba_d_head"),
        groups=config.integer("mamba_n_groups", default=1),
        state=config.integer("mamba_d_state", default=256),
        kernel=config.integer("mamba_d_conv", default=4),
        eps=config.number("rms_norm_eps", default=EPS),
        dt_limits=config.limits("time_step_limit"),
        bias=config.flag("mamba_proj_bias", default=False),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        state_dtype=state_dtype,
    )
    if settings.inner != inner:
        raise ModelError(f"config.json: mamba_n_heads · mamba_d_head = {settings.inner}, but the inner size is {inner}")
    return settings


def read_attention(config: ModelConfig) -> AttentionSettings:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=hidden // heads)
    return AttentionSettings(
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=config.flag("attention_bias", default=False),
    )


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    return gated_mlp(name) or [Piece(name)]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
