"""Kimi Linear. Its name says 48 billion parameters; its files have 49 billion."""

from tests.models.configurations.published import Published, Shapes

HIDDEN, LAYERS, VOCABULARY, EXPERTS, INNER = 2304, 27, 163840, 256, 1024
HEADS, WIDTH, RANK, SHARED = 32, 128, 512, 64
"""HEADS: heads of a layer of either kind. WIDTH: numbers of a head's query, key and value. RANK: numbers of a latent.
SHARED: numbers of the part of a key that all heads share.
"""
FULL = (4, 8, 12, 16, 20, 24, 27)
CONFIG = {
    "model_type": "kimi_linear", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
    "head_dim": 72, "intermediate_size": 9216, "hidden_act": "silu", "rms_norm_eps": 1e-5, "model_max_length": 1048576,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL], "full_attn_layers": [*FULL],
        "head_dim": WIDTH, "num_heads": HEADS, "short_conv_kernel_size": 4,
    },
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "q_lora_rank": None,
    "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": SHARED, "v_head_dim": WIDTH, "mla_use_nope": True,
    "rope_scaling": None, "rope_theta": 10000.0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_intermediate_size": INNER, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_experts": EXPERTS, "num_experts_per_token": 8, "num_expert_group": 1, "topk_group": 1,
    "num_shared_experts": 1, "routed_scaling_factor": 2.446, "use_grouped_topk": True, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def tensors() -> Shapes:
    found: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        found |= {f"{path}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= latent(f"{path}.self_attn") if layer + 1 in FULL else delta(f"{path}.self_attn")
        found |= mixture(f"{path}.block_sparse_moe") if layer else gated(f"{path}.mlp", 9216)
    return found


def delta(path: str) -> Shapes:
    inner = HEADS * WIDTH
    found: Shapes = {f"{path}.{part}_proj.weight": (inner, HIDDEN) for part in "qkv"}
    found |= {f"{path}.{part}_conv1d.weight": (inner, 1, 4) for part in "qkv"}
    found |= {f"{path}.{part}_a_proj.weight": (WIDTH, HIDDEN) for part in "fg"}
    found |= {f"{path}.{part}_b_proj.weight": (inner, WIDTH) for part in "fg"}
    return found | {
        f"{path}.b_proj.weight": (HEADS, HIDDEN),
        f"{path}.A_log": (1, 1, HEADS, 1),
        f"{path}.dt_bias": (inner,),
        f"{path}.o_norm.weight": (WIDTH,),
        f"{path}.o_proj.weight": (HIDDEN, inner),
    }


def latent(path: str) -> Shapes:
    return {
        f"{path}.q_proj.weight": (HEADS * (WIDTH + SHARED), HIDDEN),
        f"{path}.kv_a_proj_with_mqa.weight": (RANK + SHARED, HIDDEN),
        f"{path}.kv_a_layernorm.weight": (RANK,),
        f"{path}.kv_b_proj.weight": (HEADS * 2 * WIDTH, RANK),
        f"{path}.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    }


def mixture(path: str) -> Shapes:
    found: Shapes = {f"{path}.gate.weight": (EXPERTS, HIDDEN), f"{path}.gate.e_score_correction_bias": (EXPERTS,)}
    for expert in range(EXPERTS):
        found |= {f"{path}.experts.{expert}.{up}.weight": (INNER, HIDDEN) for up in ("w1", "w3")}
        found[f"{path}.experts.{expert}.w2.weight"] = (HIDDEN, INNER)
    return found | gated(f"{path}.shared_experts", INNER)


def gated(path: str, inner: int) -> Shapes:
    found: Shapes = {f"{path}.{part}_proj.weight": (inner, HIDDEN) for part in ("gate", "up")}
    return found | {f"{path}.down_proj.weight": (HIDDEN, inner)}


STATE = (LAYERS - len(FULL)) * 4 * (3 * 3 * HEADS * WIDTH + HEADS * WIDTH * WIDTH)
PUBLISHED = {
    "Kimi-Linear-48B-A3B-Instruct": Published(CONFIG, "49B", tensors(), STATE, len(FULL) * 2 * (RANK + SHARED)),
}
