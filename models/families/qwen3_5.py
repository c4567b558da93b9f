"""Qwen3.5 (transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration), and its text-only
models. They have Qwen3-Next's layers, under other names. Only the text part of vision-language models is computed.

The rotation of vision-language models has three parts, for the positions in time, height and width. In text all three
positions are equal, so the plain rotation gives the same result.
"""

import torch

from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.families import qwen3_next
from baton.models.family import Family, Piece


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    return qwen3_next.build(settled(config), dtype, state_dtype)


def settled(config: ModelConfig) -> ModelConfig:
    """Return the config, with num_experts = 0 for a dense model, whose config.json lacks this key.

    In all other models of Qwen3.5, each layer has experts, whose routing weights are renormalised. Raises ModelError if
    config.json says otherwise.
    """
    if config.values.get("model_type") in ("qwen3_5", "qwen3_5_text"):
        return ModelConfig({"num_experts": 0, **config.values}, config.has_head)
    config.require("norm_topk_prob", True)
    config.require("mlp_only_layers", [])
    config.require("decoder_sparse_step", 1)
    return config


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills; [] for the vision tower.

    Without the prefix that vision-language models add, tensors have the same names as in Qwen3-Next.
    """
    if name.startswith(("visual.", "model.visual.")):
        return []
    return qwen3_next.pieces(name.replace("language_model.", "", 1), config)


FAMILY = Family(build, pieces, "model.embed_tokens.weight", can_have_head=True)
