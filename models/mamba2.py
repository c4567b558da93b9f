"""Mamba-2 (transformers' Mamba2ForCausalLM; also Codestral Mamba and state-spaces' own files)."""

import torch
from torch import Tensor, nn

from models.batch import Batch, Pools, TensorSpec
from models.config import UNLIMITED, ModelConfig, ModelError
from models.family import Family, Piece
from models.layers.linear import Embedding, Linear
from models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from models.layers.norm import RMSNorm
from models.layers.step import BatchPlan, plan_batch


class Block(nn.Module):
    def __init__(self, settings: Mamba2Settings, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(settings.hidden, settings.eps, dtype)
        self.mixer = Mamba2Mixer(settings, index, dtype)

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """x, the output of the layer before, is not yet added to the residual; nor is what is returned with it."""
        residual, normed = self.norm(residual, x)
        return residual, self.mixer(normed, step)


class Backbone(nn.Module):
    def __init__(self, settings: Mamba2Settings, layers: int, vocab: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = Embedding(vocab, settings.hidden, tied, dtype)
        self.layers = nn.ModuleList(Block(settings, index, dtype) for index in range(layers))
        self.norm_f = RMSNorm(settings.hidden, settings.eps, dtype)


class Mamba2(nn.Module):
    max_position = UNLIMITED

    def __init__(self, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        super().__init__()
        config.require("hidden_act", "silu", "swish")
        self.settings = read_settings(config, state_dtype)
        self.layers = config.integer("num_hidden_layers")
        self.vocab_size = config.integer("vocab_size")
        self.chunk_size = config.integer("chunk_size", default=256)
        self.residual_dtype = torch.float32 if config.flag("residual_in_fp32", default=True) else dtype
        tied = config.flag("tie_word_embeddings", default=False)
        self.backbone = Backbone(self.settings, self.layers, self.vocab_size, tied, dtype)
        self.lm_head = None if tied else Linear(self.settings.hidden, self.vocab_size, False, dtype)

    def state_specs(self) -> list[TensorSpec]:
        return self.settings.state_specs() * self.layers

    def kv_specs(self) -> list[TensorSpec]:
        return []

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.run(self.embed(batch.tokens), self.plan(batch, pools))

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        return plan_batch(batch, pools, self.chunk_size, self.settings.kernel)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.backbone.embeddings(tokens).to(self.residual_dtype)
        return embedded

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        mixed: Tensor | None = None
        for block in self.backbone.layers:
            residual, mixed = block(residual, mixed, step)
        hidden: Tensor = self.backbone.norm_f(residual, mixed)[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden) if self.lm_head else self.backbone.embeddings.logits(hidden)
        return logits.float()


def read_settings(config: ModelConfig, state_dtype: torch.dtype) -> Mamba2Settings:
    hidden, expand = config.integer("hidden_size"), config.number("expand", default=2)
    settings = Mamba2Settings(
        hidden=hidden,
        heads=config.integer("num_heads"),
        width=config.integer("head_dim", default=64),
        groups=config.integer("n_groups", default=8),
        state=config.integer("state_size", default=128),
        kernel=config.integer("conv_kernel", default=4),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        dt_limits=config.limits("time_step_limit"),
        bias=config.flag("use_bias", default=False),
        conv_bias=config.flag("use_conv_bias", default=True),
        state_dtype=state_dtype,
    )
    if settings.inner != int(expand * hidden):
        raise ModelError(
            f"config.json: num_heads · head_dim = {settings.inner}, but expand · hidden_size = {expand * hidden}"
        )
    return settings


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    return [Piece(name.removeprefix("model.").replace("backbone.embedding.", "backbone.embeddings."))]


FAMILY = Family(Mamba2, pieces, "backbone.embeddings.weight")
