"""The architectures lfm2 and lfm2moe: gated short convolutions."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.family import whole
from baton.models.loading.architectures import shared
from baton.models.loading.architectures.metadata import Metadata
from baton.models.loading.architectures.shared import ATTENTION, attention, grouped_experts, with_channel, within

DECODER = (*shared.DECODER[:2], "model.embedding_norm.weight")
NAMES = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    **{
        f"shortconv.{part}.{leaf}": f"conv.{part}.{leaf}"
        for part in ("conv", "in_proj", "out_proj")
        for leaf in ("weight", "bias")
    },
    **within("self_attn", ATTENTION),
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
STACKS: dict[str, tuple[str, int | None]] = {
    "ffn_gate_exps.weight": ("feed_forward.experts.input_linear", 0),
    "ffn_up_exps.weight": ("feed_forward.experts.input_linear", 1),
    "ffn_down_exps.weight": ("feed_forward.experts.output_linear", None),
}


def config(found: Metadata) -> dict[str, Any]:
    experts, dense = found.value("expert_count", 0), found.any_has("ffn_down.weight")
    inner = found.first_shape("ffn_down.weight")[1] if dense else 1
    mixture: dict[str, Any] = {}
    if experts:
        mixture = grouped_experts(found) | {
            "num_experts": experts,
            "num_dense_layers": found.value("leading_dense_block_count"),
            "use_expert_bias": found.any_has("exp_probs_b.bias"),
        }
    return {
        "model_type": "lfm2_moe" if experts else "lfm2",
        **attention(found),
        "layer_types": found.kinds(conv="shortconv.conv.weight", full_attention="attn_q.weight"),
        "conv_L_cache": found.value("shortconv.l_cache"),
        "conv_bias": found.any_has("shortconv.conv.bias"),
        "intermediate_size": inner,
        "block_ff_dim": inner,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": found.eps,
        **mixture,
    }


def undo(leaf: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that undoes what the converter has done to a tensor."""
    return with_channel if leaf == "shortconv.conv.weight" else whole
