"""LFM2 (transformers' Lfm2ForCausalLM and Lfm2MoeForCausalLM): gated short convolutions alternating with attention."""

import re

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.decoder import Block, Decoder, Outline, checked_kinds, numbered
from baton.models.family import Family, Piece, expert_pieces, gated_mlp
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.experts import Experts, SigmoidRouter, read_sigmoid_rule
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation
from baton.models.layers.short_conv import ShortConv, ShortConvSettings
from baton.models.layers.step import BatchPlan

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
KINDS = ("conv", "full_attention")
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(w[123])\.weight")
STACKS = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
ATTENTION = {"q_layernorm": "q_norm", "k_layernorm": "k_norm", "out_proj": "o_proj"}
"""The checkpoint's names of an attention layer's parts → the names here."""


class RoutedMLP(nn.Module):
    """A mixture of routed experts, chosen by the sigmoid of their logits plus, with use_expert_bias, a correction.

    transformers adds 1e-6 to the sum that weights are divided by, which changes them by less than a millionth, unless
    all chosen scores are near 0.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, experts = config.integer("hidden_size"), config.integer("num_experts", default=32)
        rule = read_sigmoid_rule(config, top_k=config.integer("num_experts_per_tok", default=4))
        self.gate = SigmoidRouter(hidden, experts, rule, config.flag("use_expert_bias", default=True))
        inner = config.integer("moe_intermediate_size", default=1792)
        self.experts = Experts(hidden, inner, experts, "silu_gated", dtype)

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        output: Tensor = self.experts(x, *self.gate(x, step.padding))
        return output


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    """Build the model. Its states, the last inputs of convolutions, are always float32."""
    config = settled(config)
    kinds, conv, attention = read_layers(config), read_conv(config), read_attention(config)
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=128000),
        chunk_size=CHUNK,
        kernel=conv.kernel,
        states=conv.state_specs() * kinds.count("conv"),
        rings=[conv.ring_spec(dtype)] * kinds.count("conv"),
        pages=attention.kv_specs(dtype) * kinds.count("full_attention"),
        rotate=[read_rotation(config, attention.head_dim).of],
    )

    def norm() -> RMSNorm:
        return RMSNorm(conv.hidden, read_eps(config), dtype)

    def block(layer: int, kind: str, index: int) -> Block:
        is_conv = kind == "conv"
        mixer = ShortConv(conv, index, dtype) if is_conv else Attention(attention, index, dtype)
        named_mixer = {"conv" if is_conv else "self_attn": mixer}
        return Block(operator_norm=norm(), **named_mixer, ffn_norm=norm(), feed_forward=read_mlp(config, layer, dtype))

    blocks = [block(layer, kind, index) for layer, (kind, index) in enumerate(numbered(kinds))]
    return Decoder(config, outline, blocks, norm(), dtype, parts=("embed_tokens", "layers", "embedding_norm"))


def settled(config: ModelConfig) -> ModelConfig:
    """Return the config with LFM2's defaults where keys are missing: tied embeddings, and the rotation's base."""
    tied, theta = (
        config.flag("tie_embedding", "tie_word_embeddings", default=True),
        config.number("rope_theta", default=1e6),
    )
    return ModelConfig({**config.values, "tie_word_embeddings": tied, "rope_theta": theta}, config.has_head)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: conv or full_attention. full_attn_idxs, from older files, names the latter."""
    kinds = config.strings("layer_types")
    if kinds is None:
        layers = config.integer("num_hidden_layers")
        attending = (
            range(layers) if config.values.get("full_attn_idxs") is None else config.indices("full_attn_idxs", layers)
        )
        kinds = [KINDS[layer in attending] for layer in range(layers)]
    return checked_kinds(kinds, *KINDS)


def read_eps(config: ModelConfig) -> float:
    return config.number("norm_eps", default=1e-5)


def read_conv(config: ModelConfig) -> ShortConvSettings:
    hidden, kernel = config.integer("hidden_size"), config.integer("conv_L_cache", default=3)
    return ShortConvSettings(hidden, kernel, config.flag("conv_bias", default=False))


def read_attention(config: ModelConfig) -> AttentionSettings:
    return AttentionSettings.from_config(config, norm_eps=read_eps(config), norm_offset=0.0)


def read_mlp(config: ModelConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    """Build a layer's MLP. In lfm2_moe, layers from num_dense_layers on are mixtures of experts."""
    hidden = config.integer("hidden_size")
    if config.values.get("model_type") != "lfm2_moe":
        return GatedMLP(hidden, read_inner(config), dtype)
    if layer < config.integer("num_dense_layers", default=2, least=0):
        return GatedMLP(hidden, config.integer("intermediate_size", default=7168), dtype)
    return RoutedMLP(config, dtype)


def read_inner(config: ModelConfig) -> int:
    """Return the inner size of a dense model's MLPs.

    With block_auto_adjust_ff_dim, it is two thirds of the named size. If block_ffn_dim_multiplier is not null, that is
    multiplied by it, and rounded up to a multiple of block_multiple_of.
    """
    inner = config.integer("block_ff_dim", "intermediate_size", default=12288)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if config.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    inner = int(config.number("block_ffn_dim_multiplier", default=1.0) * inner)
    multiple = config.integer("block_multiple_of", default=256)
    return -(-inner // multiple) * multiple


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills. Files hold experts one by one, or stacked."""
    path, _, leaf = name.rpartition(".")
    owner, _, part = path.rpartition(".")
    if match := EXPERT.fullmatch(name):
        return expert_pieces(match[1], int(match[2]), PARTS[match[3]])
    if path.endswith(".experts") and leaf in STACKS:
        return [Piece(f"{path}.{STACKS[leaf]}")]
    if leaf == "expert_bias":
        return [Piece(f"{path}.gate.e_score_correction_bias")]
    if part in PARTS:
        return gated_mlp(f"{owner}.{PARTS[part]}_proj.{leaf}")
    if owner.endswith(".self_attn"):
        return [Piece(f"{owner}.{ATTENTION.get(part, part)}.{leaf}")]
    return [Piece(name)]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
