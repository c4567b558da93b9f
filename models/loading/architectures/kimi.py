"""The architecture kimi-linear: Kimi Delta Attention and latent attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.family import whole
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.architectures.shared import (
    ATTENTION,
    MLP,
    grouped_experts,
    log_of_decay,
    with_channel,
    within,
)

KDA = {
    "ssm_f_a.weight": "f_a_proj.weight",
    "ssm_f_b.weight": "f_b_proj.weight",
    "ssm_g_a.weight": "g_a_proj.weight",
    "ssm_g_b.weight": "g_b_proj.weight",
    "ssm_beta.weight": "b_proj.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm.weight": "o_norm.weight",
    **{f"ssm_conv1d_{part}.weight": f"{part}_conv1d.weight" for part in "qkv"},
}
LATENT = {
    "attn_q_a.weight": "q_a_proj.weight",
    "attn_q_a_norm.weight": "q_a_layernorm.weight",
    "attn_q_b.weight": "q_b_proj.weight",
    "attn_kv_a_mqa.weight": "kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "kv_a_layernorm.weight",
    "attn_kv_b.weight": "kv_b_proj.weight",
    "attn_k_b.weight": "k_b_proj.weight",
    "attn_v_b.weight": "v_b_proj.weight",
}
NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **within("self_attn", KDA | LATENT | ATTENTION),
    **within("mlp", MLP),
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def config(found: Metadata) -> dict[str, Any]:
    heads, rotated = found.largest("attention.head_count"), found.value("rope.dimension_count")
    mlps, mixture = found.kinds(sparse="ffn_gate_inp.weight", dense="ffn_gate.weight"), dict[str, Any]()
    if "sparse" in mlps:
        mixture = grouped_experts(found) | {
            "num_experts": found.value("expert_count"),
            "num_shared_experts": found.value("expert_shared_count"),
        }
    return {
        "model_type": "kimi_linear",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": found.value("attention.key_length_mla") - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": found.value("attention.value_length_mla"),
        "kv_lora_rank": found.value("attention.kv_lora_rank"),
        "q_lora_rank": found.value("attention.q_lora_rank", None),
        "linear_num_heads": found.first_shape("ssm_beta.weight")[0],
        "linear_head_dim": found.value("kda.head_dim"),
        "linear_conv_kernel_dim": found.value("ssm.conv_kernel"),
        "layer_types": found.kinds(linear_attention="ssm_a", full_attention="attn_kv_a_mqa.weight"),
        "mlp_layer_types": mlps,
        "intermediate_size": found.first_shape("ffn_down.weight")[1] if "dense" in mlps else 1,
        "rms_norm_eps": found.eps,
        **mixture,
    }


def undo(leaf: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes what the converter has done to a tensor."""
    if leaf == "ssm_a":
        return log_of_decay
    if leaf.startswith("ssm_conv1d_"):
        return with_channel
    return torch.flatten if leaf == "ssm_dt.bias" else whole
