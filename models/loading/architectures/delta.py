"""The architectures with gated delta nets: qwen3next, qwen35, qwen35moe."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.family import whole
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.architectures.shared import ATTENTION, MLP, attention, log_of_decay, with_channel, within

QWEN = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    **within("self_attn", ATTENTION),
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    **within("mlp", MLP),
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
}
STACKS: dict[str, tuple[str, int | None]] = {
    "ffn_gate_exps.weight": ("mlp.experts.input_linear", 0),
    "ffn_up_exps.weight": ("mlp.experts.input_linear", 1),
    "ffn_gate_up_exps.weight": ("mlp.experts.input_linear", None),
    "ffn_down_exps.weight": ("mlp.experts.output_linear", None),
}
SOFTMAX = 1  # llama.cpp's number of this function
NORMS = ("attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight")
"""Norms whose weights the family stores as the difference from 1, like that of the last norm."""


def qwen(found: Metadata) -> dict[str, Any]:
    heads, experts = found.value("ssm.time_step_rank"), found.value("expert_count", 0)
    attends = attention(found)
    mixture: dict[str, Any] = {}
    if experts:
        found.require("expert_gating_func", SOFTMAX)
        found.require("expert_weights_norm", True)
        found.require("expert_weights_scale", 1.0, 0.0)
        mixture = {
            "num_experts_per_tok": found.value("expert_used_count"),
            "moe_intermediate_size": found.first_shape("ffn_down_exps.weight")[2],
            "shared_expert_intermediate_size": found.first_shape("ffn_down_shexp.weight")[1],
        }
    return {
        **attends,
        "layer_types": found.kinds(linear_attention="ssm_a", full_attention="attn_q.weight"),
        "linear_conv_kernel_dim": found.value("ssm.conv_kernel"),
        "linear_key_head_dim": found.value("ssm.state_size"),
        "linear_num_key_heads": found.value("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": found.value("ssm.inner_size") // heads,
        "rms_norm_eps": found.eps,
        "partial_rotary_factor": found.value("rope.dimension_count") / attends["head_dim"],
        "intermediate_size": found.first_shape("ffn_down.weight")[1] if found.any_has("ffn_down.weight") else 1,
        "num_experts": experts,
        **mixture,
    }


def qwen3_next(found: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3_next", **qwen(found)}


def qwen3_5(found: Metadata) -> dict[str, Any]:
    values = qwen(found)
    return {"model_type": "qwen3_5_moe_text" if values["num_experts"] else "qwen3_5_text", **values}


def undo(leaf: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes what the converter has done to a tensor."""
    if leaf in NORMS or leaf == "output_norm.weight":
        return minus_one
    match leaf:
        case "ssm_a":
            return log_of_decay
        case "ssm_conv1d.weight":
            return with_channel
        case "ffn_gate_inp_shexp.weight":
            return as_row
    return whole


def minus_one(tensor: Tensor) -> Tensor:
    return tensor.float() - 1


def as_row(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1)


def undo_tiled(leaf: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes what the converter has done to a tensor of Qwen3.5.

    It has also put the value heads into another order: those that share a key head are no neighbours.
    """
    first, keys = undo(leaf, config), config.integer("linear_num_key_heads")
    shared = config.integer("linear_num_value_heads") // keys
    width, untouched = config.integer("linear_value_head_dim"), 2 * keys * config.integer("linear_key_head_dim")
    order = partial(neighbours, keys, shared)
    match leaf:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            return lambda tensor: torch.cat([first(tensor)[:untouched], order(width, 0, first(tensor)[untouched:])])
        case "attn_gate.weight":
            return partial(order, width, 0)
        case "ssm_beta.weight" | "ssm_alpha.weight" | "ssm_dt.bias":
            return partial(order, 1, 0)
        case "ssm_a":
            return lambda tensor: order(1, 0, first(tensor))
        case "ssm_out.weight":
            return partial(order, width, 1)
    return first


def neighbours(keys: int, shared: int, width: int, dim: int, tensor: Tensor) -> Tensor:
    """Return a tensor with the value heads of each key head next to each other.

    keys, shared: the number of key heads, and of value heads of each of them
    width: numbers of a value head along `dim`
    """
    heads = tensor.reshape(*tensor.shape[:dim], shared, keys, width, *tensor.shape[dim + 1 :])
    return heads.transpose(dim, dim + 1).reshape(tensor.shape)
