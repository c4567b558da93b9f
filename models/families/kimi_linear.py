"""Kimi Linear (transformers' KimiLinearForCausalLM): Kimi Delta Attention, latent attention, and experts."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from baton.kernels.moe.routing import RoutingRule
from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, numbered
from baton.models.family import Family, Piece, expert_pieces, gated_mlp, rows_of
from baton.models.layers.experts import Experts, SigmoidRouter, read_sigmoid_rule
from baton.models.layers.kda import KdaMixer, KdaSettings
from baton.models.layers.mla import LatentAttention, LatentSettings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
KINDS = ("linear_attention", "full_attention")
MLPS = ("dense", "sparse")
MIXER = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.")
PROJECTED = re.compile(r"(.*)\.(q|k|v|b|f_a|g_a)_proj\.weight")
CONVOLVED = re.compile(r"(.*)\.(q|k|v)_conv1d\.weight")
EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(w[123])\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
LATER = ("gate_lower_bound", "use_full_rank_gate", "mla_use_output_gate", "attn_res_block_size", "latent_moe_use_norm")
"""Keys of later models with this model_type. They change the computation, so they are refused."""


class KimiMixture(nn.Module):
    """A mixture of routed experts, plus shared experts. The shared experts are computed as one MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, experts = config.integer("hidden_size"), config.integer("num_experts", "num_local_experts")
        inner = config.integer("moe_intermediate_size")
        self.gate = SigmoidRouter(hidden, experts, read_rule(config))
        self.experts = Experts(hidden, inner, experts, "silu_gated", dtype)
        shared = config.integer("num_shared_experts", "n_shared_experts", default=1)
        self.shared_experts = GatedMLP(hidden, inner * shared, dtype)

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        routed = self.experts(x, *self.gate(x, step.padding))
        return add_shared(routed, self.shared_experts(x))


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    config.require("mla_use_nope", True)
    for name in LATER:
        config.require(name, None, False)
        ModelConfig(read_linear(config)).require(name, None, False)
    kinds, kda, attention = read_layers(config), read_kda(config, state_dtype), read_attention(config)
    outline = Outline(
        max_position=config.integer("model_max_length", "max_position_embeddings", default=1048576),
        chunk_size=CHUNK,
        kernel=kda.kernel,
        states=kda.state_specs() * kinds.count("linear_attention"),
        rings=[kda.ring_spec(dtype)] * kinds.count("linear_attention"),
        pages=attention.kv_specs(dtype) * kinds.count("full_attention"),
        forms=attention.forms(),
    )

    def norm() -> RMSNorm:
        return RMSNorm(kda.hidden, kda.eps, dtype)

    def mixer(kind: str, index: int) -> nn.Module:
        if kind == "linear_attention":
            return KdaMixer(kda, index, dtype)
        return LatentAttention(attention, index, dtype)

    def mlp(kind: str) -> nn.Module:
        if kind == "sparse":
            return KimiMixture(config, dtype)
        return GatedMLP(kda.hidden, config.integer("intermediate_size"), dtype)

    blocks = [
        Block(input_layernorm=norm(), self_attn=mixer(*kind), post_attention_layernorm=norm(), mlp=mlp(mlp_kind))
        for kind, mlp_kind in zip(numbered(kinds), read_mlps(config), strict=True)
    ]
    return Decoder(config, outline, blocks, norm(), dtype)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: linear_attention or full_attention.

    kda_layers and full_attn_layers, which older files have instead of layer_types, count layers from 1.
    """
    kinds, layers = config.strings("layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        nested = ModelConfig(read_linear(config))
        linear, full = (nested.indices(name, layers + 1) for name in ("kda_layers", "full_attn_layers"))
        if sorted(linear + full) != [*range(1, layers + 1)]:
            raise ModelError(
                f"config.json: kda_layers and full_attn_layers should name each layer from 1 to {layers} once"
            )
        kinds = [KINDS[layer in full] for layer in range(1, layers + 1)]
    return checked(kinds, layers, "layer_types", KINDS)


def read_mlps(config: ModelConfig) -> list[str]:
    """Return the kind of each layer's MLP: dense, or sparse if it has experts."""
    kinds, layers = config.strings("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        dense = config.integer("first_k_dense_replace", default=1, least=0)
        interval = config.integer("moe_layer_freq", default=1)
        kinds = [MLPS[layer >= dense and layer % interval == 0] for layer in range(layers)]
    return checked(kinds, layers, "mlp_layer_types", MLPS)


def checked(kinds: list[str], layers: int, name: str, known: tuple[str, ...]) -> list[str]:
    """Return `kinds`, the value of the key `name`. Raises ModelError unless each layer has one of the known kinds."""
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        supported = ", ".join(known)
        raise ModelError(f"config.json: unknown layers {', '.join(unknown)} in {name} (supported: {supported})")
    if len(kinds) != layers:
        raise ModelError(f"config.json: {name} names {len(kinds)} layers, not num_hidden_layers = {layers}")
    return kinds


def read_linear(config: ModelConfig) -> dict[str, Any]:
    """Return linear_attn_config, or the same values from the top-level keys that transformers writes instead of it."""
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    nested = config.values.get("linear_attn_config") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"config.json: linear_attn_config should be an object, not {nested!r}")
    return {name: config.values.get(other) for name, other in names.items()} | nested


def read_eps(config: ModelConfig) -> float:
    return config.number("rms_norm_eps", default=1e-5)


def read_kda(config: ModelConfig, state_dtype: torch.dtype) -> KdaSettings:
    sizes = ModelConfig(read_linear(config))
    return KdaSettings(
        hidden=config.integer("hidden_size"),
        heads=sizes.integer("num_heads"),
        width=sizes.integer("head_dim"),
        kernel=sizes.integer("short_conv_kernel_size", default=4),
        eps=read_eps(config),
        state_dtype=state_dtype,
    )


def read_attention(config: ModelConfig) -> LatentSettings:
    heads = config.integer("num_attention_heads")
    config.require("num_key_value_heads", heads)
    return LatentSettings(
        hidden=config.integer("hidden_size"),
        heads=heads,
        own=config.integer("qk_nope_head_dim"),
        shared=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
        rank=config.integer("kv_lora_rank"),
        query_rank=None if config.values.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        bias=config.flag("attention_bias", default=False),
    )


def read_rule(config: ModelConfig) -> RoutingRule:
    config.require("moe_router_activation_func", "sigmoid")
    config.require("use_grouped_topk", True)
    return read_sigmoid_rule(
        config,
        top_k=config.integer("num_experts_per_token", "num_experts_per_tok"),
        renormalise=("moe_renormalize", "norm_topk_prob"),
        groups=("num_expert_group", "n_group"),
    )


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills.

    A mixer's projections and its convolutions are each joined into one parameter, and kv_b_proj is split.
    """
    name = name.replace(".block_sparse_moe.", ".mlp.")
    if match := EXPERT.fullmatch(name):
        return expert_pieces(match[1], int(match[2]), PARTS[match[3]])
    mixer = MIXER.match(name)
    if mixer and int(mixer[1]) in linear_layers(config):
        return kda_pieces(name, read_kda(config, torch.float32))
    if name.endswith(".kv_b_proj.weight"):
        return latent_pieces(name.removesuffix(".kv_b_proj.weight"), read_attention(config))
    return gated_mlp(name) or [Piece(name)]


def linear_layers(config: ModelConfig) -> list[int]:
    return [layer for layer, kind in enumerate(read_layers(config)) if kind == "linear_attention"]


def kda_pieces(name: str, s: KdaSettings) -> list[Piece]:
    if match := PROJECTED.fullmatch(name):
        return [Piece(f"{match[1]}.in_proj.weight", place=rows_of(s.rows[match[2]]))]
    if match := CONVOLVED.fullmatch(name):
        return [Piece(f"{match[1]}.conv1d.weight", place=rows_of(s.rows[match[2]]))]
    if name.endswith(".A_log"):
        return [Piece(name, take=torch.flatten)]
    return [Piece(name)]


def latent_pieces(owner: str, s: LatentSettings) -> list[Piece]:
    """Return which parameters kv_b_proj fills. For each head, it holds the rows of the keys, then of the values."""

    def heads(weight: Tensor) -> Tensor:
        return weight.reshape(s.heads, s.own + s.value, -1)

    return [
        Piece(f"{owner}.k_b_proj.weight", take=lambda weight: heads(weight)[:, : s.own].mT),
        Piece(f"{owner}.v_b_proj.weight", take=lambda weight: heads(weight)[:, s.own :]),
    ]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
