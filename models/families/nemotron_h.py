"""Nemotron-H (transformers' NemotronHForCausalLM): each layer is one Mamba-2 mixer, attention without positions, an
MLP, or a mixture of experts.
"""

import re
from dataclasses import replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import RENAMED_KINDS, Decoder, MixerBlock, Outline, checked_kinds, numbered
from baton.models.family import Family, Piece, is_of_head
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.experts import Experts, SigmoidRouter, read_sigmoid_rule
from baton.models.layers.linear import Linear
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import SquaredReluMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.prediction import SEEN_FROM, PredictionHead
from baton.models.layers.step import BatchPlan

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern, and the kinds of layers for which they stand."""
EXPERT = re.compile(r"(.*\.mixer\.experts)\.(\d+)\.(up|down)_proj\.weight")
STACKS = {"up": "input_linear", "down": "output_linear"}
HEAD_BLOCK = re.compile(r"mtp\.layers\.(\d+)\.(enorm|hnorm|eh_proj|final_layernorm)\.weight")
HEAD_PARTS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "fc", "final_layernorm": "norm"}


class LatentMoE(nn.Module):
    """A mixture of routed experts, and one expert that all tokens share.

    If config.json has moe_latent_size, the routed experts work on hidden states that are projected to that size.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, count = config.integer("hidden_size"), config.integer("n_routed_experts")
        bias, latent = config.flag("mlp_bias", default=False), config.integer("moe_latent_size", default=0, least=0)
        inner, shared = (config.integer(f"moe_{of}intermediate_size") for of in ("", "shared_expert_"))
        rule = read_sigmoid_rule(config, top_k=config.integer("num_experts_per_tok", default=2))
        self.gate = SigmoidRouter(hidden, count, rule)
        self.experts = Experts(latent or hidden, inner, count, "relu2", dtype)
        self.shared_experts = SquaredReluMLP(hidden, shared, bias, dtype)
        self.fc1_latent_proj = Linear(hidden, latent, bias, dtype) if latent else None
        self.fc2_latent_proj = Linear(latent, hidden, bias, dtype) if latent else None

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for x [tokens, hidden]."""
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
    kinds, mamba = read_layers(config), read_mamba(config, state_dtype)
    attention = AttentionSettings.from_config(config, head_dim=("head_dim", "attention_head_dim"))
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=4096),
        chunk_size=config.integer("mamba_chunk_size", "chunk_size", default=128),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        rings=[mamba.ring_spec(dtype)] * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * (kinds.count("attention") + config.has_head),
        residual_dtype=torch.float32 if config.flag("residual_in_fp32", default=False) else dtype,
    )

    def norm() -> RMSNorm:
        return RMSNorm(mamba.hidden, mamba.eps, dtype)

    def mixer(kind: str, index: int) -> nn.Module:
        if kind == "mamba":
            return Mamba2Mixer(mamba, index, dtype)
        if kind == "attention":
            return Attention(attention, index, dtype)
        if kind == "moe":
            return LatentMoE(config, dtype)
        bias = config.flag("mlp_bias", default=False)
        return SquaredReluMLP(mamba.hidden, config.integer("intermediate_size"), bias, dtype)

    blocks, head = [MixerBlock(norm=norm(), mixer=mixer(kind, index)) for kind, index in numbered(kinds)], None
    if config.has_head:
        first = Attention(replace(attention, seen_from=SEEN_FROM), kinds.count("attention"), dtype)
        mixers = [first, *(mixer(kind, 0) for kind in read_head(config)[1:])]
        of_head = [MixerBlock(norm=norm(), mixer=mixer) for mixer in mixers]
        head = PredictionHead(mamba.hidden, (norm(), norm(), norm()), of_head, dtype)
    return Decoder(config, outline, blocks, norm(), dtype, "backbone", ("embeddings", "layers", "norm_f"), head)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: mamba, attention, mlp or moe."""
    names = config.strings("layers_block_type", "layer_types")
    pattern = config.values.get("hybrid_override_pattern")
    lettered = [PATTERN.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else None
    kinds = [RENAMED_KINDS.get(name, name) for name in names] if names is not None else lettered
    if kinds is None:
        raise ModelError("config.json lacks hybrid_override_pattern (or layers_block_type)")
    if lettered not in (None, kinds):
        raise ModelError("config.json: hybrid_override_pattern and layers_block_type name different layers")
    return checked_kinds(kinds, "mamba", "attention", "mlp", "moe")


def read_head(config: ModelConfig) -> list[str]:
    """Return the kind of each block of the head for multi-token prediction: attention, then MLPs or experts."""
    pattern = config.values.get("mtp_hybrid_override_pattern", "*E")
    kinds = [PATTERN.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else []
    if kinds[:1] != ["attention"] or not {"mlp", "moe"}.issuperset(kinds[1:]):
        raise ModelError(
            f"config.json: mtp_hybrid_override_pattern {pattern!r} is not supported: it should be one *, then E or -"
        )
    return kinds


def read_mamba(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    """Read the mixer's settings. Nemotron-H has other keys for them than Mamba2Settings.from_config reads."""
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


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills; [] for a head for multi-token prediction not to load."""
    if is_of_head(name):
        if not config.has_head:
            return []
        name = name[name.index("mtp.") :]
        if part := HEAD_BLOCK.fullmatch(name):
            return [Piece(f"mtp.{HEAD_PARTS[part[2]]}.weight")]
    name = "backbone." + name.removeprefix("model.") if name.startswith("model.") else name
    if expert := EXPERT.fullmatch(name):
        return [Piece(f"{expert[1]}.{STACKS[expert[3]]}", place=itemgetter(int(expert[2])))]
    return [Piece(name)]


FAMILY = Family(build, pieces, "backbone.embeddings.weight", can_have_head=True)
