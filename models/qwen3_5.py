"""Qwen3.5 (transformers' Qwen3_5ForConditionalGeneration and -MoeForConditionalGeneration), of which only text is
computed, and its models of text alone: Qwen3-Next's layers, other files.

Positions of text are the same in all three parts of its rotation, which is then the plain one.
"""

import torch

from baton.models import qwen3_next
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.family import Family, Piece


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    return qwen3_next.build(settled(config), dtype, state_dtype)


def settled(config: ModelConfig) -> ModelConfig:
    """With what the dense models' config.json does not say. Unlike Qwen3-Next's, every layer of the others has experts,
    whose weights for a token sum to 1.
    """
    if config.values.get("model_type") in ("qwen3_5", "qwen3_5_text"):
        return ModelConfig({"num_experts": 0, **config.values})
    config.require("norm_topk_prob", True)
    config.require("mlp_only_layers", [])
    config.require("decoder_sparse_step", 1)
    return config


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """As Qwen3-Next's, below the vision-language model's prefix; what it sees with is left out."""
    if name.startswith(("visual.", "model.visual.")):
        return []
    return qwen3_next.pieces(name.replace("language_model.", "", 1), config)


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
