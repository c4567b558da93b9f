"""Names of tensors, keys and undone changes that several architectures of GGUF files share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from baton.models.loading.architectures.metadata import Metadata

DECODER = ("model.embed_tokens.weight", "model.layers", "model.norm.weight")
ATTENTION = {
    f"attn_{part}.{leaf}": f"{own}.{leaf}"
    for part, own in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj"))
    for leaf in ("weight", "bias")
}
MLP = {f"ffn_{part}.weight": f"{part}_proj.weight" for part in ("gate", "up", "down")}
SIGMOID = 2  # llama.cpp's number of this function


def within(owner: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return names with the module that has these tensors."""
    return {name: f"{owner}.{own}" for name, own in names.items()}


def attention(found: Metadata) -> dict[str, Any]:
    """Return the keys of attention. A head's width follows from the tensors, because not all files name it."""
    heads, base = found.largest("attention.head_count"), found.value("rope.freq_base", None)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": found.largest("attention.head_count_kv"),
        "head_dim": found.first_shape("attn_output.weight")[1] // heads,
        "attention_bias": found.any_has("attn_q.bias"),
        **({"rope_theta": base} if base is not None else {}),
    }


def grouped_experts(found: Metadata) -> dict[str, Any]:
    """Return the keys of experts that a sigmoid chooses. Raises ModelError for experts that a softmax chooses."""
    found.require("expert_gating_func", SIGMOID)
    return {
        "num_experts_per_tok": found.value("expert_used_count"),
        "moe_intermediate_size": found.first_shape("ffn_up_exps.weight")[1],
        "routed_scaling_factor": found.value("expert_weights_scale", 1.0) or 1.0,  # 0: not set
        "norm_topk_prob": found.value("expert_weights_norm", True),
        "n_group": found.value("expert_group_count", 1) or 1,
        "topk_group": found.value("expert_group_used_count", 1) or 1,
    }


def log_of_decay(tensor: Tensor) -> Tensor:
    """Return A_log. The converter has written A = -exp(A_log)."""
    return torch.log(-tensor.float()).flatten()


def with_channel(tensor: Tensor) -> Tensor:
    """Return a convolution's weight [channels, 1, kernel], from which the converter has removed a dimension."""
    return tensor.reshape(-1, 1, tensor.shape[-1])
