"""The architectures with Mamba-2 layers: mamba2, granitehybrid, falcon-h1, nemotron_h, nemotron_h_moe."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelConfig, ModelError
from baton.models.family import whole
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.architectures.shared import (
    ATTENTION,
    DECODER,
    MLP,
    attention,
    grouped_experts,
    log_of_decay,
    with_channel,
    within,
)

BACKBONE = ("backbone.embeddings.weight", "backbone.layers", "backbone.norm_f.weight")
FALCON_DECODER = (*DECODER[:2], "model.final_layernorm.weight")
MIXER = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
MAMBA2 = {"attn_norm.weight": "norm.weight", **within("mixer", MIXER)}
GRANITE = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **within("mamba", MIXER),
    **within("self_attn", ATTENTION),
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_down.weight": "shared_mlp.output_linear.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
}
GRANITE_STACKS: dict[str, tuple[str, int | None]] = {
    "ffn_gate.weight": ("shared_mlp.input_linear.weight", 0),
    "ffn_up.weight": ("shared_mlp.input_linear.weight", 1),
    "ffn_gate_shexp.weight": ("shared_mlp.input_linear.weight", 0),
    "ffn_up_shexp.weight": ("shared_mlp.input_linear.weight", 1),
    "ffn_gate_exps.weight": ("block_sparse_moe.experts.input_linear", 0),
    "ffn_up_exps.weight": ("block_sparse_moe.experts.input_linear", 1),
    "ffn_down_exps.weight": ("block_sparse_moe.experts.output_linear", None),
}
FALCON_H1 = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm": "pre_ff_layernorm.weight",  # so in most files, without .weight
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **within("mamba", MIXER),
    **within("self_attn", ATTENTION),
    **within("feed_forward", MLP),
}
NEMOTRON_H = {
    "attn_norm.weight": "norm.weight",
    **within("mixer", MIXER),
    **within("mixer", ATTENTION),
    **{f"ffn_{part}.{leaf}": f"mixer.{part}_proj.{leaf}" for part in ("up", "down") for leaf in ("weight", "bias")},
    "ffn_gate_inp.weight": "mixer.gate.weight",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
    "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
}
NEMOTRON_STACKS: dict[str, tuple[str, int | None]] = {
    "ffn_up_exps.weight": ("mixer.experts.input_linear", None),
    "ffn_down_exps.weight": ("mixer.experts.output_linear", None),
}


def mamba2(found: Metadata) -> dict[str, Any]:
    heads, inner = found.value("ssm.time_step_rank"), found.value("ssm.inner_size")
    return {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner / found.value("embedding_length"),
        "state_size": found.value("ssm.state_size"),
        "n_groups": found.value("ssm.group_count"),
        "conv_kernel": found.value("ssm.conv_kernel"),
        "use_conv_bias": found.any_has("ssm_conv1d.bias"),
        "layer_norm_epsilon": found.eps,
    }


def hybrid_mamba(found: Metadata) -> dict[str, Any]:
    """Return the keys of a mixer that Granite and Falcon-H1 share."""
    heads, inner = found.value("ssm.time_step_rank"), found.value("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": found.value("ssm.state_size"),
        "mamba_n_groups": found.value("ssm.group_count"),
        "mamba_d_conv": found.value("ssm.conv_kernel"),
        "mamba_conv_bias": found.any_has("ssm_conv1d.bias"),
        "rms_norm_eps": found.eps,
    }


def granite(found: Metadata) -> dict[str, Any]:
    attends, experts = attention(found), found.value("expert_count", 0)
    width, hidden = attends["head_dim"], found.value("embedding_length")
    shared = "ffn_down_shexp.weight" if experts else "ffn_down.weight"
    rotates = found.value("rope.scaling.finetuned", False)
    if rotates and found.value("rope.dimension_count", width) != width:
        raise ModelError("GGUF: files of Bamba, which rotates a part of each head, are not read")
    return {
        "model_type": "granitemoehybrid",
        **hybrid_mamba(found),
        **attends,
        "mamba_expand": found.value("ssm.inner_size") // hidden,
        "layer_types": found.kinds(mamba="ssm_a", attention="attn_q.weight"),
        "intermediate_size": found.largest("feed_forward_length"),
        "shared_intermediate_size": found.first_shape(shared)[1] if found.any_has(shared) else 0,
        "num_local_experts": experts,
        "num_experts_per_tok": found.value("expert_used_count", 0) or 1,
        "attention_multiplier": found.value("attention.scale", width**-0.5),
        "embedding_multiplier": found.value("embedding_scale", 1.0),
        "residual_multiplier": found.value("residual_scale", 1.0),
        "logits_scaling": found.value("logit_scale", 1.0),
        "position_embedding_type": "rope" if rotates else "nope",
    }


def falcon_h1(found: Metadata) -> dict[str, Any]:
    """Return the config. The converter has multiplied all multipliers into the weights."""
    return {
        "model_type": "falcon_h1",
        **hybrid_mamba(found),
        **attention(found),
        "mamba_d_ssm": found.value("ssm.inner_size"),
        "mamba_rms_norm": found.any_has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "intermediate_size": found.largest("feed_forward_length"),
    }


def nemotron_h(found: Metadata) -> dict[str, Any]:
    mixer, kinds = (
        hybrid_mamba(found),
        found.kinds(mamba="ssm_a", attention="attn_q.weight", moe="ffn_gate_inp.weight", mlp="ffn_up.weight"),
    )
    experts: dict[str, Any] = {}
    if "moe" in kinds:
        latent = "ffn_latent_down.weight"
        experts = {
            **grouped_experts(found),
            "n_routed_experts": found.value("expert_count"),
            "moe_shared_expert_intermediate_size": found.first_shape("ffn_up_shexp.weight")[0],
            "moe_latent_size": found.first_shape(latent)[0] if found.any_has(latent) else 0,
        }
    return {
        "model_type": "nemotron_h",
        **attention(found),
        "layers_block_type": kinds,
        "mamba_num_heads": mixer["mamba_n_heads"],
        "mamba_head_dim": mixer["mamba_d_head"],
        "ssm_state_size": mixer["mamba_d_state"],
        "n_groups": mixer["mamba_n_groups"],
        "conv_kernel": mixer["mamba_d_conv"],
        "use_conv_bias": mixer["mamba_conv_bias"],
        "layer_norm_epsilon": mixer["rms_norm_eps"],
        "mlp_bias": found.any_has("ffn_up.bias"),
        "intermediate_size": found.first_shape("ffn_up.weight")[0] if "mlp" in kinds else 1,
        **experts,
    }


def undo(leaf: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes what the converter has done to a tensor."""
    match leaf:
        case "ssm_a":
            return log_of_decay
        case "ssm_d" | "ssm_norm.weight":
            return torch.flatten
        case "ssm_conv1d.weight":
            return with_channel
        case "attn_q.weight" | "attn_k.weight" if config.values["model_type"] == "granitemoehybrid":
            heads = "num_attention_heads" if leaf == "attn_q.weight" else "num_key_value_heads"
            return unpermuted(config.integer(heads))
    return whole


def unpermuted(heads: int) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes the order of rows for rotations of neighbouring numbers."""

    def take(weight: Tensor) -> Tensor:
        return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    return take
