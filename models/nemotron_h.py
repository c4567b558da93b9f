"""Nemotron-H (transformers' NemotronHForCausalLM): one mixer a layer, attention without positions, MLPs or experts."""

import re
from operator import itemgetter

import torch
from torch import Tensor, nn

from baton.kernels.moe.routing import RoutingRule
from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, MixerBlock, Outline, numbered
from baton.models.family import Family, Piece
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.experts import Experts, SigmoidRouter
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import SquaredReluMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}

EXPERT = re.compile(r"(.*\.mixer\.experts)\.(\d+)\.(up|down)_proj\.weight")
STACKS = {"up": "input_linear", "down": "output_linear"}


class LatentMoE(nn.Module):
    """Routed experts, which work in a space of their own if there is moe_latent_size, and one that all tokens share."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, count = config.integer("hidden_size"), config.integer("n_routed_experts")
        bias, latent = config.flag("mlp_bias", default=False), config.integer("moe_latent_size", default=0, least=0)
        inner, shared = (config.integer(f"moe_{of}intermediate_size") for of in ("", "shared_expert_"))
        self.gate = SigmoidRouter(hidden, count, read_routing(config))
        self.experts = Experts(latent or hidden, inner, count, "relu2", dtype)
        self.shared_experts = SquaredReluMLP(hidden, shared, bias, dtype)
        self.fc1_latent_proj = Linear(hidden, latent, bias, dtype) if latent else None
        self.fc2_latent_proj = Linear(latent, hidden, bias, dtype) if latent else None

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        """x: [T, hidden] → [T, hidden]."""
        chosen, weights = self.gate(x, step.padding)
        routed = self.experts(self.fc1_latent_proj(x) if self.fc1_latent_proj else x, chosen, weights)
        if self.fc2_latent_proj:
            routed = self.fc2_latent_proj(routed)
        return add_shared(routed, self.shared_experts(x))


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("mamba_hidden_act", "silu", "swish")
    config.require("mlp_hidden_act", "relu2")
    config.require("tie_word_embeddings", False)
    config.require("sliding_window", None)
    config.require("n_shared_experts", 1)
    kinds, vocabulary = read_layers(config), config.integer("vocab_size")
    mamba, attention = read_mamba(config, state_dtype), read_attention(config)
    hidden = mamba.hidden
    outline = Outline(
        vocab_size=vocabulary,
        max_position=config.integer("max_position_embeddings", default=4096),
        chunk_size=config.integer("mamba_chunk_size", "chunk_size", default=128),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * kinds.count("attention"),
        residual_dtype=torch.float32 if config.flag("residual_in_fp32", default=False) else dtype,
    )

    def norm() -> RMSNorm:
        return RMSNorm(hidden, mamba.eps, dtype)

    def mixer(kind: str, index: int) -> nn.Module:
        if kind == "mamba":
            return Mamba2Mixer(mamba, index, dtype)
        if kind == "attention":
            return Attention(attention, index, dtype)
        if kind == "moe":
            return LatentMoE(config, dtype)
        bias = config.flag("mlp_bias", default=False)
        return SquaredReluMLP(hidden, config.integer("intermediate_size"), bias, dtype)

    return Decoder(
        outline,
        Embedding(vocabulary, hidden, False, dtype),
        [MixerBlock(norm=norm(), mixer=mixer(kind, index)) for kind, index in numbered(kinds)],
        norm(),
        Linear(hidden, vocabulary, False, dtype),
        "backbone",
        ("embeddings", "layers", "norm_f"),
    )


def read_layers(config: ModelConfig) -> list[str]:
    """The kind of each layer: mamba, attention, mlp or moe."""
    named = config.strings("layers_block_type", "layer_types")
    pattern = config.values.get("hybrid_override_pattern")
    if named is None and isinstance(pattern, str):
        named = [PATTERN.get(letter, letter) for letter in pattern]
    if named is None:
        raise ModelError("config.json lacks hybrid_override_pattern (or layers_block_type)")
    kinds = [RENAMED.get(kind, kind) for kind in named]
    if not kinds:
        raise ModelError("config.json: there are no layers")
    unknown = sorted(set(kinds) - {"mamba", "attention", "mlp", "moe"})
    if unknown:
        raise ModelError(f"config.json: unknown layers {', '.join(unknown)}")
    return kinds


def read_mamba(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    return Mamba2Settings(
        hidden=config.integer("hidden_size"),
        heads=config.integer("mamba_num_heads"),
        width=config.integer("mamba_head_dim", default=64),
        groups=config.integer("mamba_n_groups", "n_groups", default=8),
        state=config.integer("ssm_state_size", default=128),
        kernel=config.integer("mamba_d_conv", "conv_kernel", default=4),
        eps=config.number("layer_norm_epsilon", "rms_norm_eps", "norm_eps", default=1e-5),
        dt_limits=config.limits("mamba_dt_limit", "time_step_limit"),
        bias=config.flag("use_bias", "mamba_proj_bias", default=False),
        conv_bias=config.flag("mamba_conv_bias", "use_conv_bias", default=True),
        state_dtype=state_dtype,
    )


def read_attention(config: ModelConfig) -> AttentionSettings:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", "attention_head_dim", default=hidden // heads)
    return AttentionSettings(
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=config.flag("attention_bias", default=False),
    )


def read_routing(config: ModelConfig) -> RoutingRule:
    return RoutingRule(
        top_k=config.integer("num_experts_per_tok", default=2),
        scores="sigmoid",
        renormalise=config.flag("norm_topk_prob", default=True),
        groups=config.integer("n_group", default=1),
        groups_kept=config.integer("topk_group", default=1),
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Leaves out the layers for multi-token prediction."""
    if name.startswith(("mtp.", "model.mtp.", "backbone.mtp.")):
        return []
    name = "backbone." + name.removeprefix("model.") if name.startswith("model.") else name
    if expert := EXPERT.fullmatch(name):
        return [Piece(f"{expert[1]}.{STACKS[expert[3]]}", place=itemgetter(int(expert[2])))]
    return [Piece(name)]


FAMILY = Family(build, pieces, "backbone.embeddings.weight")
