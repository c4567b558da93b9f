"""Granite 4 hybrid, dense or with experts (transformers' GraniteMoeHybridForCausalLM)."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, Outline, numbered
from baton.models.family import Family, Piece, expert_pieces
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.experts import Experts, SoftmaxRouter
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Rotation, read_rotation
from baton.models.layers.step import BatchPlan

RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
EXPERTS = {
    "input_linear.weight": "experts.input_linear",
    "output_linear.weight": "experts.output_linear",
    "router.layer.weight": "router.weight",
}
"""What a checkpoint calls the weights of a layer's experts, and their parameters."""
EXPERT = re.compile(r"(.*\.block_sparse_moe\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
"""Those of llm-compressor, which takes them apart."""


class BlockSparseMoE(nn.Module):
    """Routed experts: the softmax of a token's chosen experts' logits says how much each counts."""

    def __init__(self, config: ModelConfig, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, top_k = config.integer("hidden_size"), config.integer("num_experts_per_tok", default=2)
        self.router = SoftmaxRouter(hidden, count, top_k, True, dtype, softmax_first=False)
        self.experts = Experts(hidden, config.integer("intermediate_size"), count, "silu_gated", dtype)

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        """x: [T, hidden] → [T, hidden]."""
        output: Tensor = self.experts(x, *self.router(x, step.padding))
        return output


class GraniteBlock(nn.Module):
    """A mixer (`mamba` or `self_attn`), then an MLP, experts or both; each adds its output × residual_multiplier."""

    def __init__(self, config: ModelConfig, name: str, mixer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        self.multiplier = read_residual_multiplier(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.add_module(name, mixer)
        self._mixer = (mixer,)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        experts, intermediate = read_experts(config), read_shared_size(config)
        self.block_sparse_moe = BlockSparseMoE(config, experts, dtype) if experts else None
        self.shared_mlp = GatedMLP(hidden, intermediate, dtype) if intermediate else None

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """As models/decoder.py:Decoder's blocks."""
        residual, normed = self.input_layernorm(residual, x, self.multiplier)
        [mixer] = self._mixer
        residual, normed = self.post_attention_layernorm(residual, mixer(normed, step), self.multiplier)
        return residual, self._feed_forward(normed, step)

    def _feed_forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        shared: Tensor | None = self.shared_mlp(x) if self.shared_mlp else None
        if self.block_sparse_moe is None:
            assert shared is not None
            return shared
        routed: Tensor = self.block_sparse_moe(x, step)
        return routed if shared is None else add_shared(routed, shared)


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    refuse_unsupported(config)
    kinds, vocabulary = read_layers(config), config.integer("vocab_size")
    mamba, attention = read_mamba(config, state_dtype), read_attention(config)
    hidden, tied = mamba.hidden, config.flag("tie_word_embeddings", default=False)
    residual_multiplier = read_residual_multiplier(config)
    outline = Outline(
        vocab_size=vocabulary,
        max_position=config.integer("max_position_embeddings", default=2048),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * kinds.count("attention"),
        rotate=read_positions(config, attention.head_dim),
        multipliers=(
            config.number("embedding_multiplier", default=1.0),
            residual_multiplier,
            1 / config.number("logits_scaling", default=1.0),
        ),
    )

    def block(kind: str, index: int) -> GraniteBlock:
        is_mamba = kind == "mamba"
        mixer = Mamba2Mixer(mamba, index, dtype) if is_mamba else Attention(attention, index, dtype)
        return GraniteBlock(config, "mamba" if is_mamba else "self_attn", mixer, dtype)

    return Decoder(
        outline,
        Embedding(vocabulary, hidden, tied, dtype),
        [block(kind, index) for kind, index in numbered(kinds)],
        RMSNorm(hidden, mamba.eps, dtype),
        None if tied else Linear(hidden, vocabulary, False, dtype),
    )


def refuse_unsupported(config: ModelConfig) -> None:
    if not read_experts(config) and not read_shared_size(config):
        raise ModelError(
            "config.json: num_local_experts = 0 and shared_intermediate_size = 0 leave layers without MLPs"
        )
    config.require("hidden_act", "silu", "swish")
    config.require("position_embedding_type", "rope", "nope")


def read_experts(config: ModelConfig) -> int:
    """How many each layer has."""
    return config.integer("num_local_experts", default=8, least=0)


def read_shared_size(config: ModelConfig) -> int:
    """The inner size of the MLP that all tokens share; 0 where there is none."""
    return config.integer("shared_intermediate_size", default=1024, least=0)


def read_layers(config: ModelConfig) -> list[str]:
    """The kind of each layer: mamba or attention."""
    named = config.strings("layer_types", "layers_block_type") or ["mamba"] * config.integer("num_hidden_layers")
    kinds = [RENAMED.get(kind, kind) for kind in named]
    if not kinds:
        raise ModelError("config.json: there are no layers")
    unknown = sorted(set(kinds) - {"mamba", "attention"})
    if unknown:
        raise ModelError(f"config.json: unknown layers {', '.join(unknown)}")
    return kinds


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
        eps=config.number("rms_norm_eps", default=1e-6),
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
    return AttentionSettings(
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=config.integer("head_dim", default=hidden // heads),
        scale=config.number("attention_multiplier", default=1.0),
        bias=config.flag("attention_bias", default=False),
    )


def read_residual_multiplier(config: ModelConfig) -> float:
    return config.number("residual_multiplier", default=1.0)


def read_positions(config: ModelConfig, head_dim: int) -> Callable[[Tensor], Rotation] | None:
    """None if positions are not encoded."""
    return read_rotation(config, head_dim).of if config.values.get("position_embedding_type") == "rope" else None


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Leaves out an MLP without inner values, as transformers saves it."""
    if ".shared_mlp." in name and not read_shared_size(config):
        return []
    if match := EXPERT.fullmatch(name):
        return expert_pieces(match[1], int(match[2]), match[3])
    path, found, projection = name.partition(".block_sparse_moe.")
    return [Piece(path + found + EXPERTS.get(projection, projection))]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
