"""Granite 4 hybrid, dense or with experts (transformers' GraniteMoeHybridForCausalLM)."""

import torch
from torch import Tensor, nn

from kernels.shared_expert import add_shared
from models.batch import Batch, Pools, TensorSpec
from models.config import ModelConfig, ModelError
from models.family import Family, Piece
from models.layers.attention import Attention, AttentionSettings
from models.layers.experts import Experts, SoftmaxRouter
from models.layers.linear import Embedding, Linear
from models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import RotationSettings, read_rotation
from models.layers.step import BatchPlan, plan_batch

RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
EXPERTS = {
    "input_linear.weight": "experts.input_linear",
    "output_linear.weight": "experts.output_linear",
    "router.layer.weight": "router.weight",
}
"""What a checkpoint calls the weights of a layer's experts, and their parameters."""


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


class Block(nn.Module):
    """A mixer (`mamba` or `self_attn`), then an MLP, experts or both; each adds its output × residual_multiplier."""

    def __init__(self, config: ModelConfig, mixer: Mamba2Mixer | Attention, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        self.multiplier = read_residual_multiplier(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.mamba = mixer if isinstance(mixer, Mamba2Mixer) else None
        self.self_attn = mixer if isinstance(mixer, Attention) else None
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        experts, intermediate = read_experts(config), read_shared_size(config)
        self.block_sparse_moe = BlockSparseMoE(config, experts, dtype) if experts else None
        self.shared_mlp = GatedMLP(hidden, intermediate, dtype) if intermediate else None

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """x, the output of the layer before, is not yet added to the residual; nor is what is returned with it."""
        residual, normed = self.input_layernorm(residual, x, self.multiplier)
        mixed = self.self_attn(normed, step) if self.self_attn else self.mamba(normed, step)  # type: ignore[misc]
        residual, normed = self.post_attention_layernorm(residual, mixed, self.multiplier)
        return residual, self._feed_forward(normed, step)

    def _feed_forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        shared: Tensor | None = self.shared_mlp(x) if self.shared_mlp else None
        if self.block_sparse_moe is None:
            assert shared is not None
            return shared
        routed: Tensor = self.block_sparse_moe(x, step)
        return routed if shared is None else add_shared(routed, shared)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, mixers: list[Mamba2Mixer | Attention], dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.integer("hidden_size")
        tied = config.flag("tie_word_embeddings", default=False)
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden, tied, dtype)
        self.layers = nn.ModuleList(Block(config, mixer, dtype) for mixer in mixers)
        self.norm = RMSNorm(hidden, config.number("rms_norm_eps", default=1e-6), dtype)


class GraniteMoeHybrid(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        super().__init__()
        refuse_unsupported(config)
        self.kinds = read_layers(config)
        self.vocab_size = config.integer("vocab_size")
        self.chunk_size = config.integer("mamba_chunk_size", default=256)
        self.max_position = config.integer("max_position_embeddings", default=2048)
        self.dtype = dtype
        self.mamba, self.attention = read_mamba(config, state_dtype), read_attention(config)
        self.rotation = read_positions(config, self.attention.head_dim)
        self.embedding_multiplier = config.number("embedding_multiplier", default=1.0)
        self.residual_multiplier = read_residual_multiplier(config)
        self.logits_scaling = config.number("logits_scaling", default=1.0)
        self.model = Decoder(config, [self._mixer(layer) for layer in range(len(self.kinds))], dtype)
        self.lm_head = (
            None if self.model.embed_tokens.tied else Linear(self.mamba.hidden, self.vocab_size, False, dtype)
        )

    def _mixer(self, layer: int) -> Mamba2Mixer | Attention:
        kind = self.kinds[layer]
        index = self.kinds[:layer].count(kind)
        if kind == "mamba":
            return Mamba2Mixer(self.mamba, index, self.dtype)
        return Attention(self.attention, index, self.dtype)

    def state_specs(self) -> list[TensorSpec]:
        return self.mamba.state_specs() * self.kinds.count("mamba")

    def kv_specs(self) -> list[TensorSpec]:
        return self.attention.kv_specs(self.dtype) * self.kinds.count("attention")

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.run(self.embed(batch.tokens), self.plan(batch, pools))

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        rotate = self.rotation.of if self.rotation else None
        return plan_batch(batch, pools, self.chunk_size, self.mamba.kernel, rotate)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(tokens) * self.embedding_multiplier
        return embedded

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        x: Tensor | None = None
        for block in self.model.layers:
            residual, x = block(residual, x, step)
        hidden: Tensor = self.model.norm(residual, x, self.residual_multiplier)[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden) if self.lm_head else self.model.embed_tokens.logits(hidden)
        return logits.float() / self.logits_scaling


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


def read_positions(config: ModelConfig, head_dim: int) -> RotationSettings | None:
    """None if positions are not encoded."""
    return read_rotation(config, head_dim) if config.values.get("position_embedding_type") == "rope" else None


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Leaves out an MLP without inner values, as transformers saves it."""
    if ".shared_mlp." in name and not read_shared_size(config):
        return []
    path, found, projection = name.partition(".block_sparse_moe.")
    return [Piece(path + found + EXPERTS.get(projection, projection))]


FAMILY = Family(GraniteMoeHybrid, pieces, "model.embed_tokens.weight")
