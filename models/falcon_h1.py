"""Falcon-H1 (transformers' FalconH1ForCausalLM): attention and Mamba-2 beside each other in every layer, then an MLP.

Its multipliers (maximal update parametrization, Yang et al., 2022, arXiv:2203.03466) stand where they are exact: in the
scale of attention, in the additions to the residual stream, at the embedding and at the logits. Those before something
that is not linear are multiplied into rows of weights at load, in float32, and rounded with them: ssm_in_multiplier and
ssm_multipliers into mamba.in_proj, attention_in_multiplier into q_proj, k_proj and v_proj, and the first of
mlp_multipliers into gate_proj.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, Outline
from baton.models.family import Family, Piece, gated_mlp, scaled
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation
from baton.models.layers.step import BatchPlan

EPS = 1e-5


@dataclass(frozen=True)
class Multipliers:
    """ssm: of the rows of in_proj for z, x, B, C and dt."""

    embedding: float
    logits: float
    ssm: list[float]
    ssm_in: float
    ssm_out: float
    attention_in: float
    attention_out: float
    gate: float
    down: float

    @classmethod
    def read(cls, config: ModelConfig) -> "Multipliers":
        gate, down = config.numbers("mlp_multipliers", 2)
        return cls(
            embedding=config.number("embedding_multiplier", default=1.0),
            logits=config.number("lm_head_multiplier", default=1.0),
            ssm=config.numbers("ssm_multipliers", 5),
            ssm_in=config.number("ssm_in_multiplier", default=1.0),
            ssm_out=config.number("ssm_out_multiplier", default=1.0),
            attention_in=config.number("attention_in_multiplier", default=1.0),
            attention_out=config.number("attention_out_multiplier", default=1.0),
            gate=gate,
            down=down,
        )


class ParallelBlock(nn.Module):
    """A Mamba-2 mixer and attention over the same input, then an MLP."""

    def __init__(self, config: ModelConfig, mamba: Mamba2Mixer, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=EPS)
        bias = config.flag("mlp_bias", default=False)
        self.multipliers = Multipliers.read(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.mamba = mamba
        self.self_attn = attention
        self.pre_ff_layernorm = RMSNorm(hidden, eps, dtype)
        self.feed_forward = GatedMLP(hidden, config.integer("intermediate_size"), dtype, bias)

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """As models/decoder.py:Decoder's blocks."""
        m = self.multipliers
        residual, normed = self.input_layernorm(residual, x, m.down)
        residual, _ = self.pre_ff_layernorm(residual, self.mamba(normed, step), m.ssm_out)
        residual, normed = self.pre_ff_layernorm(residual, self.self_attn(normed, step), m.attention_out)
        return residual, self.feed_forward(normed)


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    config.require("attn_layer_indices", None)
    layers, vocabulary = config.integer("num_hidden_layers"), config.integer("vocab_size")
    mamba, attention, multipliers = read_mamba(config, state_dtype), read_attention(config), Multipliers.read(config)
    hidden, tied = mamba.hidden, config.flag("tie_word_embeddings", default=False)
    outline = Outline(
        vocab_size=vocabulary,
        max_position=config.integer("max_position_embeddings", default=8192),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * layers,
        pages=attention.kv_specs(dtype) * layers,
        rotate=read_rotation(config, attention.head_dim).of,
        multipliers=(multipliers.embedding, multipliers.down, multipliers.logits),
    )

    def block(layer: int) -> ParallelBlock:
        mixers = Mamba2Mixer(mamba, layer, dtype), Attention(attention, layer, dtype)
        return ParallelBlock(config, *mixers, dtype)

    return Decoder(
        outline,
        Embedding(vocabulary, hidden, tied, dtype),
        [block(layer) for layer in range(layers)],
        RMSNorm(hidden, mamba.eps, dtype),
        None if tied else Linear(hidden, vocabulary, False, dtype),
        parts=("embed_tokens", "layers", "final_layernorm"),
    )


def read_mamba(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_n_heads", default=128)
    inner = read_inner(config)
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
        out_bias=config.flag("projectors_bias", default=False),
        normed=config.flag("mamba_rms_norm", default=False),
        norm_before_gate=config.flag("mamba_norm_before_gate", default=True),
    )
    if settings.inner != inner:
        raise ModelError(f"config.json: mamba_n_heads · mamba_d_head = {settings.inner}, but the inner size is {inner}")
    return settings


def read_inner(config: ModelConfig) -> int:
    """mamba_d_ssm; where the key is null, mamba_expand · hidden_size; where it is not there, transformers' 1024."""
    if "mamba_d_ssm" in config.values and config.values["mamba_d_ssm"] is None:
        return config.integer("mamba_expand", default=2) * config.integer("hidden_size")
    return config.integer("mamba_d_ssm", default=1024)


def read_attention(config: ModelConfig) -> AttentionSettings:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=hidden // heads)
    return AttentionSettings(
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5 * config.number("key_multiplier", default=1.0),
        bias=config.flag("attention_bias", default=False),
    )


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    m, (path, _, leaf) = Multipliers.read(config), name.rpartition(".")
    is_weight, projection = leaf == "weight", path.rpartition(".")[2]
    if projection == "in_proj":
        s = read_mamba(config, torch.float32)
        parts = [s.inner, s.inner, s.groups * s.state, s.groups * s.state, s.heads]
        factors = [factor * (m.ssm_in if is_weight else 1.0) for factor in m.ssm]
        return [Piece(name, scaled(*zip(parts, factors, strict=True)))]
    if projection in ("q_proj", "k_proj", "v_proj") and is_weight:
        a = read_attention(config)
        outputs = (a.heads if projection == "q_proj" else a.kv_heads) * a.head_dim
        return [Piece(name, scaled((outputs, m.attention_in)))]
    if projection == "gate_proj":
        [gate] = gated_mlp(name)
        return [Piece(gate.parameter, scaled((config.integer("intermediate_size"), m.gate)), gate.place)]
    return gated_mlp(name) or [Piece(name)]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
