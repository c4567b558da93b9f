"""Qwen3.5 (transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration), and its text-only
models: Qwen3-Next's layers in other files. Only the text part of the vision-language models is computed.

Their rotation has three parts, for time, height and width. For text all three positions are the same, so it is the
plain rotation.
"""

import torch

from baton.models import qwen3_next
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.family import Family, Piece


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    return qwen3_next.build(settled(config), dtype, state_dtype)


def settled(config: ModelConfig) -> ModelConfig:
    """Return the config with what is implicit in Qwen3.5: its dense models have no experts.

    In its other models every layer has experts, whose weights are renormalised. ModelError if config.json differs.
    """
    if config.values.get("model_type") in ("qwen3_5", "qwen3_5_text"):
        return ModelConfig({"num_experts": 0, **config.values})
    config.require("norm_topk_prob", True)
    config.require("mlp_only_layers", [])
    config.require("decoder_sparse_step", 1)
    return config


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return what a tensor fills, as in Qwen3-Next, without the vision-language models' prefix.

    The vision tower is left out.
    """
    if name.startswith(("visual.", "model.visual.")):
        return []
    return qwen3_next.pieces(name.replace("language_model.", "", 1), config)


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
