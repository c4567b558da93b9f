"""LFM2 and LFM2.5.

Parameters of the dense models are as their cards name them (354,483,968, 742,489,344 and 1,170,340,608), and LFM2.5's
1.2B has the layers of LFM2's. The experts' sizes are the defaults of transformers' Lfm2MoeConfig, whose documentation
says that they are those of LFM2-8B-A1B (8.3B); its card has 24 layers, 6 of them with attention.
"""

from typing import Any

from tests.models.configurations.published import Published, Shapes

VOCABULARY = 65536
ATTENTION = {16: (2, 5, 8, 10, 12, 14), 24: (2, 6, 10, 14, 18, 21)}
"""Indices of the layers that have attention, by the model's number of layers."""
EXPERTS, WIDTH, DENSE, INNER = 32, 1792, 2, 7168


def common(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "vocab_size": VOCABULARY, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1000000.0,
        "max_position_embeddings": 128000, "torch_dtype": "bfloat16",
    }  # fmt: skip


def kinds(layers: int) -> list[str]:
    return ["full_attention" if layer in ATTENTION[layers] else "conv" for layer in range(layers)]


def tensors(hidden: int, layers: int, heads: int) -> Shapes:
    """Return the tensors of a model without its feed-forward layers."""
    found: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden), "model.embedding_norm.weight": (hidden,),
    }  # fmt: skip
    for layer, kind in enumerate(kinds(layers)):
        path, width = f"model.layers.{layer}", hidden // heads
        found |= {f"{path}.{norm}.weight": (hidden,) for norm in ("operator_norm", "ffn_norm")}
        if kind == "conv":
            found[f"{path}.conv.in_proj.weight"] = (3 * hidden, hidden)
            found[f"{path}.conv.conv.weight"] = (hidden, 1, 3)
            found[f"{path}.conv.out_proj.weight"] = (hidden, hidden)
            continue
        found |= {f"{path}.self_attn.{part}_proj.weight": (hidden, hidden) for part in ("q", "out")}
        found |= {f"{path}.self_attn.{part}_proj.weight": (8 * width, hidden) for part in ("k", "v")}
        found |= {f"{path}.self_attn.{part}_layernorm.weight": (width,) for part in ("q", "k")}
    return found


def mlp(path: str, hidden: int, inner: int) -> Shapes:
    sizes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    return {f"{path}.{part}.weight": shape for part, shape in sizes.items()}


def sizes(hidden: int, layers: int, heads: int) -> tuple[int, int]:
    """Return the bytes of a state in float32, and of a token's keys and values in bfloat16."""
    attending = len(ATTENTION[layers])
    return (layers - attending) * 2 * hidden * 4, attending * 2 * 8 * (hidden // heads) * 2


def dense(size: str, hidden: int, heads: int, named: int, inner: int, newer: bool = False) -> Published:
    """Describe a dense model of 16 layers.

    named: block_ff_dim in config.json. inner: the size that is made of it.
    newer: whether config.json has the keys of newer versions of transformers.
    """
    config = {
        **common(hidden, 16, heads), "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    }  # fmt: skip
    if newer:
        config |= {"intermediate_size": named, "layer_types": kinds(16), "tie_word_embeddings": True}
    else:
        config |= {"block_ff_dim": named, "full_attn_idxs": list(ATTENTION[16]), "tie_embedding": True}
    found = tensors(hidden, 16, heads)
    for layer in range(16):
        found |= mlp(f"model.layers.{layer}.feed_forward", hidden, inner)
    return Published(config, size, found, *sizes(hidden, 16, heads))


def with_experts() -> Published:
    config = {
        **common(2048, 24, 32), "model_type": "lfm2_moe", "layer_types": kinds(24), "num_dense_layers": DENSE,
        "intermediate_size": INNER, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0, "tie_embedding": True,
    }  # fmt: skip
    found = tensors(2048, 24, 32)
    for layer in range(24):
        path = f"model.layers.{layer}.feed_forward"
        if layer < DENSE:
            found |= mlp(path, 2048, INNER)
            continue
        found |= {f"{path}.gate.weight": (EXPERTS, 2048), f"{path}.expert_bias": (EXPERTS,)}
        for expert in range(EXPERTS):
            found |= mlp(f"{path}.experts.{expert}", 2048, WIDTH)
    return Published(config, "8.3B", found, *sizes(2048, 24, 32))


PUBLISHED = {
    "LFM2-350M": dense("354483968", 1024, 16, 6656, 4608),
    "LFM2-700M": dense("742489344", 1536, 24, 10240, 6912),
    "LFM2-1.2B": dense("1170340608", 2048, 32, 12288, 8192),
    "LFM2.5-1.2B": dense("1170340608", 2048, 32, 12288, 8192, newer=True),
    "LFM2-8B-A1B": with_experts(),
}
