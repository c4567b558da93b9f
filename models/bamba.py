"""Bamba (transformers' BambaForCausalLM): Mamba-2 with a few attention layers, each layer with a gated MLP."""

import torch
from torch import Tensor, nn

from models.batch import Batch, Pools, TensorSpec
from models.config import ModelConfig, ModelError
from models.family import Family, Piece, gated_mlp
from models.layers.attention import Attention, AttentionSettings
from models.layers.linear import Embedding, Linear
from models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import read_rotation
from models.layers.step import BatchPlan, plan_batch

EPS = 1e-5
ROTATED = 0.5


class Block(nn.Module):
    """A mixer (`mamba` or `self_attn`), then an MLP."""

    def __init__(self, config: ModelConfig, mixer: Mamba2Mixer | Attention, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=EPS)
        bias = config.flag("mlp_bias", default=False)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.mamba = mixer if isinstance(mixer, Mamba2Mixer) else None
        self.self_attn = mixer if isinstance(mixer, Attention) else None
        self.pre_ff_layernorm = RMSNorm(hidden, eps, dtype)
        self.feed_forward = GatedMLP(hidden, config.integer("intermediate_size"), dtype, bias)

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """x, the output of the layer before, is not yet added to the residual; nor is what is returned with it."""
        residual, normed = self.input_layernorm(residual, x)
        mixed = self.self_attn(normed, step) if self.self_attn else self.mamba(normed, step)  # type: ignore[misc]
        residual, normed = self.pre_ff_layernorm(residual, mixed)
        return residual, self.feed_forward(normed)


class BambaDecoder(nn.Module):
    def __init__(self, config: ModelConfig, mixers: list[Mamba2Mixer | Attention], dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.integer("hidden_size")
        tied = config.flag("tie_word_embeddings", default=False)
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden, tied, dtype)
        self.layers = nn.ModuleList(Block(config, mixer, dtype) for mixer in mixers)
        self.final_layernorm = RMSNorm(hidden, config.number("rms_norm_eps", default=EPS), dtype)


class Bamba(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        super().__init__()
        config.require("hidden_act", "silu", "swish")
        self.kinds = read_layers(config)
        self.vocab_size = config.integer("vocab_size")
        self.chunk_size = config.integer("mamba_chunk_size", default=256)
        self.max_position = config.integer("max_position_embeddings", default=262144)
        self.dtype = dtype
        self.mamba, self.attention = read_mamba(config, state_dtype), read_attention(config)
        self.rotation = read_rotation(config, self.attention.head_dim, ROTATED)
        self.model = BambaDecoder(config, [self._mixer(layer) for layer in range(len(self.kinds))], dtype)
        hidden, tied = self.mamba.hidden, self.model.embed_tokens.tied
        self.lm_head = None if tied else Linear(hidden, self.vocab_size, False, dtype)

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
        return plan_batch(batch, pools, self.chunk_size, self.mamba.kernel, self.rotation.of)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(tokens)
        return embedded

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        x: Tensor | None = None
        for block in self.model.layers:
            residual, x = block(residual, x, step)
        hidden: Tensor = self.model.final_layernorm(residual, x)[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden) if self.lm_head else self.model.embed_tokens.logits(hidden)
        return logits.float()


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


FAMILY = Family(Bamba, pieces, "model.embed_tokens.weight")
