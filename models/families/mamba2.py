"""Mamba-2 (transformers' Mamba2ForCausalLM; also Codestral Mamba and state-spaces' own files)."""

import torch

from baton.models.config import UNLIMITED, ModelConfig, ModelError
from baton.models.decoder import Decoder, MixerBlock, Outline
from baton.models.family import Family, Piece
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.norm import RMSNorm


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    settings, layers = read_settings(config, state_dtype), config.integer("num_hidden_layers")
    outline = Outline(
        max_position=UNLIMITED,
        chunk_size=config.integer("chunk_size", default=256),
        kernel=settings.kernel,
        states=settings.state_specs() * layers,
        rings=[settings.ring_spec(dtype)] * layers,
        pages=[],
        residual_dtype=torch.float32 if config.flag("residual_in_fp32", default=True) else dtype,
    )

    def norm() -> RMSNorm:
        return RMSNorm(settings.hidden, settings.eps, dtype)

    blocks = [MixerBlock(norm=norm(), mixer=Mamba2Mixer(settings, layer, dtype)) for layer in range(layers)]
    return Decoder(config, outline, blocks, norm(), dtype, "backbone", ("embeddings", "layers", "norm_f"))


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


FAMILY = Family(build, pieces, "backbone.embeddings.weight")
