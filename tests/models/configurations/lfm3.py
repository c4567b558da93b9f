"""LFM3.

config.json is as in the files of LFM3-1.7B; what it leaves out (vocabulary, norms and gates) are the defaults of
transformers' Lfm3Config. Its files name the gate of attention heads gate_proj, as transformers' renaming shows.
"""

from typing import Any

from tests.models.configurations.published import Published, Shapes, attention

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, KERNEL = 128000, 2048, 7680, 16, 4, 128, 7
KINDS = ["conv", *["conv", "full_attention", "conv", "sliding_attention"] * 5, "conv", "full_attention", "conv"]


def config() -> dict[str, Any]:
    """Return config.json, whose partial rotation is called "default"."""
    return {
        "model_type": "lfm3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": 24, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH,
        "layer_types": KINDS, "conv_L_cache": KERNEL, "conv_bias": False, "norm_eps": 1e-5, "sliding_window": 256,
        "max_position_embeddings": 262144, "tie_word_embeddings": True, "dtype": "bfloat16",
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
        },
    }  # fmt: skip


def tensors() -> Shapes:
    found: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.embedding_norm.weight": (HIDDEN,),
    }  # fmt: skip
    for layer, kind in enumerate(KINDS):
        path = f"model.layers.{layer}"
        norms = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
        found |= {f"{path}.{norm}.weight": (HIDDEN,) for norm in norms}
        found |= {f"{path}.feed_forward.{part}.weight": (INNER, HIDDEN) for part in ("w1", "w3")}
        found[f"{path}.feed_forward.w2.weight"] = (HIDDEN, INNER)
        if kind == "conv":
            found[f"{path}.conv.in_proj.weight"] = (3 * HIDDEN, HIDDEN)
            found[f"{path}.conv.conv.weight"] = (HIDDEN, 1, KERNEL)
            found[f"{path}.conv.out_proj.weight"] = (HIDDEN, HIDDEN)
            continue
        found |= attention(f"{path}.self_attn", HIDDEN, HEADS, KV_HEADS, WIDTH)
        found |= {f"{path}.self_attn.{part}_norm.weight": (WIDTH,) for part in ("q", "k")}
        found[f"{path}.self_attn.gate_proj.weight"] = (HEADS, HIDDEN)
    return found


CONVOLUTIONS = KINDS.count("conv")
STATE, KV = CONVOLUTIONS * (KERNEL - 1) * HIDDEN * 4, (24 - CONVOLUTIONS) * 2 * KV_HEADS * WIDTH * 2
PUBLISHED = {"LFM3-1.7B": Published(config(), "1.7B", tensors(), STATE, KV)}
