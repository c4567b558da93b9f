"""Falcon-H1 (transformers' FalconH1ForCausalLM): attention and Mamba-2 in parallel in every layer, then an MLP.

The model multiplies its activations by constants, the multipliers (maximal update parametrization, Yang et al., 2022,
arXiv:2203.03466). Where it is exact, multipliers are applied in the computation: to the scale of attention, to
additions to the residual stream, to the embeddings and to the logits.
Multipliers before a nonlinear function are multiplied into rows of weights when the weights are loaded. The products
are computed in float32 and then rounded to the dtype of the weights. ssm_in_multiplier and ssm_multipliers go into
mamba.in_proj, attention_in_multiplier into q_proj, k_proj and v_proj, the first of mlp_multipliers into gate_proj.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.decoder import Decoder, Outline
from baton.models.family import Family, Piece, gated_mlp, scaled
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation
from baton.models.layers.step import BatchPlan

EPS = 1e-5


@dataclass(frozen=True)
class Multipliers:
    """The multipliers in config.json. Names with `_in` and `_out` belong to a mixer's input and output."""

    embedding: float
    logits: float
    ssm: list[float]  # one each for the rows of in_proj that compute z, x, B, C and dt
    ssm_in: float
    ssm_out: float
    attention_in: float
    attention_out: float
    gate: float
    down: float  # of the MLP's output

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Multipliers":
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
    """A block of a Mamba-2 mixer and attention over the same input, then an MLP."""

    def __init__(self, config: ModelConfig, mamba: Mamba2Mixer, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=EPS)
        bias = config.flag("mlp_bias", default=False)
        self.multipliers = Multipliers.from_config(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.mamba = mamba
        self.self_attn = attention
        self.pre_ff_layernorm = RMSNorm(hidden, eps, dtype)
        self.feed_forward = GatedMLP(hidden, config.integer("intermediate_size"), dtype, bias)

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """Return the new residual, and an output that is yet to be added to it: see models/decoder.py:Decoder."""
        m = self.multipliers
        residual, normed = self.input_layernorm(residual, x, m.down)
        # RMSNorm adds, then normalizes. Only the sum is used here: attention's output must be added before the norm.
        residual, _ = self.pre_ff_layernorm(residual, self.mamba(normed, step), m.ssm_out)
        residual, normed = self.pre_ff_layernorm(residual, self.self_attn(normed, step), m.attention_out)
        return residual, self.feed_forward(normed)


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    config.require("attn_layer_indices", None)
    layers, multipliers = config.integer("num_hidden_layers"), Multipliers.from_config(config)
    mamba, attention = read_mamba(config, state_dtype), read_attention(config)
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=8192),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * layers,
        rings=[mamba.ring_spec(dtype)] * layers,
        pages=attention.kv_specs(dtype) * layers,
        rotate=[read_rotation(config, attention.head_dim).of],
        multipliers=(multipliers.embedding, multipliers.down, multipliers.logits),
    )

    def block(layer: int) -> ParallelBlock:
        mixers = Mamba2Mixer(mamba, layer, dtype), Attention(attention, layer, dtype)
        return ParallelBlock(config, *mixers, dtype)

    blocks, norm = [block(layer) for layer in range(layers)], RMSNorm(mamba.hidden, mamba.eps, dtype)
    return Decoder(config, outline, blocks, norm, dtype, parts=("embed_tokens", "layers", "final_layernorm"))


def read_mamba(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    """Read the mixer's settings.

    mamba_d_ssm is the inner size: null stands for mamba_expand · hidden_size; the default is 1024, as in transformers.
    """
    is_null = "mamba_d_ssm" in config.values and config.values["mamba_d_ssm"] is None
    inner = None if is_null else config.integer("mamba_d_ssm", default=1024)
    return replace(
        Mamba2Settings.from_config(config, state_dtype, eps=EPS, inner=inner),
        out_bias=config.flag("projectors_bias", default=False),
        normed=config.flag("mamba_rms_norm", default=False),
        norm_before_gate=config.flag("mamba_norm_before_gate", default=True),
    )


def read_attention(config: ModelConfig) -> AttentionSettings:
    """Read attention's settings; key_multiplier becomes part of attention's scale."""
    settings = AttentionSettings.from_config(config)
    return replace(settings, scale=settings.scale * config.number("key_multiplier", default=1.0))


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills. Weights before nonlinear functions are multiplied."""
    m, (path, _, leaf) = Multipliers.from_config(config), name.rpartition(".")
    is_weight, projection = leaf == "weight", path.rpartition(".")[2]
    if projection == "in_proj":
        s = read_mamba(config, torch.float32)
        parts = [s.inner, s.inner, s.groups * s.state, s.groups * s.state, s.heads]  # rows for z, x, B, C and dt
        # ssm_in multiplies the input, so it applies to the weight only; ssm multiplies the output, and so the bias too.
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
