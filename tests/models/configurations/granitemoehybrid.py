"""Granite 4's hybrids."""

from dataclasses import replace
from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

ATTENTION = {32: (10, 13, 17, 27), 40: (5, 15, 25, 35)}
"""Indices of the layers that have attention, by the model's number of layers."""


def config(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, mamba: tuple[int, int]) -> dict[str, Any]:
    kinds = ["attention" if layer in ATTENTION[layers] else "mamba" for layer in range(layers)]
    return {
        "model_type": "granitemoehybrid", "hidden_size": hidden, "num_hidden_layers": layers, "layer_types": kinds,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "shared_intermediate_size": mlp,
        "intermediate_size": mlp, "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 100352,
        "mamba_n_heads": mamba[0], "mamba_d_head": mamba[1], "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "attention_bias": False, "position_embedding_type": "nope", "hidden_act": "silu",
        "normalization_function": "rmsnorm", "rms_norm_eps": 1e-5, "rope_theta": 10000, "rope_scaling": None,
        "tie_word_embeddings": True, "embedding_multiplier": 12, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "logits_scaling": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip


def tensors(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, mamba: tuple[int, int]) -> Shapes:
    found: Shapes = {"model.embed_tokens.weight": (100352, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        path = f"model.layers.{layer}"
        found |= {f"{path}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if layer in ATTENTION[layers]:
            found |= attention(f"{path}.self_attn", hidden, heads, kv_heads, hidden // heads)
        else:
            found |= mamba2_mixer(f"{path}.mamba", hidden, *mamba, 1, 128)
        found[f"{path}.shared_mlp.input_linear.weight"] = (2 * mlp, hidden)
        found[f"{path}.shared_mlp.output_linear.weight"] = (hidden, mlp)
    return found


def dense(
    size: str, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, mamba: tuple[int, int]
) -> Published:
    shape = (hidden, layers, heads, kv_heads, mlp, mamba)
    state, kv = (layers - 4) * mamba2_state(*mamba, 1, 128), 4 * 2 * 2 * kv_heads * (hidden // heads)
    return Published(config(*shape), size, tensors(*shape), state, kv)


def with_experts(
    size: str, hidden: int, heads: int, kv_heads: int, mlp: int, mamba: tuple[int, int], experts: tuple[int, int, int]
) -> Published:
    """Describe a model with experts; experts: (number, number per token, inner size)."""
    count, top_k, inner = experts
    there = dense(size, hidden, 40, heads, kv_heads, mlp, mamba)
    routed = {"num_local_experts": count, "num_experts_per_tok": top_k, "intermediate_size": inner}
    found = dict(there.tensors)
    for layer in range(40):
        path = f"model.layers.{layer}.block_sparse_moe"
        found[f"{path}.router.layer.weight"] = (count, hidden)
        found[f"{path}.input_linear.weight"] = (count, 2 * inner, hidden)
        found[f"{path}.output_linear.weight"] = (count, hidden, inner)
    return replace(there, config={**there.config, **routed}, tensors=found)


PUBLISHED = {
    "granite-4.0-h-350m": dense("340M", 768, 32, 12, 4, 2048, (48, 32)),
    "granite-4.0-h-1b": dense("1.5B", 1536, 40, 12, 4, 4096, (48, 64)),
    "granite-4.0-h-micro": dense("3.19B", 2048, 40, 32, 8, 8192, (64, 64)),
    "granite-4.0-h-tiny": with_experts("7B", 1536, 12, 4, 1024, (48, 64), (64, 6, 512)),
    "granite-4.0-h-small": with_experts("32B", 4096, 32, 8, 1536, (128, 64), (72, 10, 768)),
}
