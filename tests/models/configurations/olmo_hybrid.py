"""OLMo Hybrid.

Sizes are the defaults of transformers' OlmoHybridConfig, which names allenai/Olmo-Hybrid-7B as their source. The null
rope_theta and the number of tensors, 523, are as a change to the authors' training code describes the files
(allenai/open-instruct, pull request 1822).
"""

from tests.models.configurations.published import Published, Shapes, attention

HIDDEN, LAYERS, VOCABULARY, INNER, HEADS = 3840, 32, 100352, 11008, 30
KEY, VALUE = 96, 192
"""Numbers of a head's key and value in a delta net."""
FULL = range(3, LAYERS, 4)
CONFIG = {
    "model_type": "olmo_hybrid", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
    "intermediate_size": INNER, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 65536,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "attention_bias": False,
    "layer_types": ["full_attention" if layer in FULL else "linear_attention" for layer in range(LAYERS)],
    "linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    "rope_parameters": {"rope_theta": None}, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def tensors() -> Shapes:
    found: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        found |= {f"{path}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        found[f"{path}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        if layer in FULL:
            found |= attention(f"{path}.self_attn", HIDDEN, HEADS, HEADS, HIDDEN // HEADS)
            found |= {f"{path}.self_attn.{part}_norm.weight": (HIDDEN,) for part in "qk"}
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        else:
            found |= delta(f"{path}.linear_attn")
            norms = ("attention_layer_norm", "feedforward_layer_norm")
        found |= {f"{path}.{norm}.weight": (HIDDEN,) for norm in norms}
    return found


def delta(path: str) -> Shapes:
    keys, inner = HEADS * KEY, HEADS * VALUE
    found: Shapes = {f"{path}.{part}_proj.weight": (keys, HIDDEN) for part in "qk"}
    found |= {f"{path}.{part}_proj.weight": (inner, HIDDEN) for part in "vg"}
    found |= {f"{path}.{part}_proj.weight": (HEADS, HIDDEN) for part in "ab"}
    found |= {f"{path}.{part}_conv1d.weight": (keys, 1, 4) for part in "qk"}
    return found | {
        f"{path}.v_conv1d.weight": (inner, 1, 4),
        f"{path}.A_log": (HEADS,),
        f"{path}.dt_bias": (HEADS,),
        f"{path}.o_norm.weight": (VALUE,),
        f"{path}.o_proj.weight": (HIDDEN, inner),
    }


TENSORS = tensors()
assert len(TENSORS) == 523
STATE = (LAYERS - len(FULL)) * 4 * (3 * HEADS * (2 * KEY + VALUE) + HEADS * KEY * VALUE)
PUBLISHED = {"Olmo-Hybrid-7B": Published(CONFIG, "7B", TENSORS, STATE, len(FULL) * 2 * 2 * HIDDEN)}
