"""Bamba."""

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

ATTENTION = (9, 18, 27)
CONFIG = {
    "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "attn_layer_indices": list(ATTENTION),
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_rotary_emb": 64, "intermediate_size": 14336,
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "vocab_size": 128256, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip


def tensors() -> Shapes:
    found: Shapes = {
        "model.embed_tokens.weight": (128256, 4096),
        "model.final_layernorm.weight": (4096,),
        "lm_head.weight": (128256, 4096),
    }
    for layer in range(32):
        path = f"model.layers.{layer}"
        found |= {f"{path}.{norm}.weight": (4096,) for norm in ("input_layernorm", "pre_ff_layernorm")}
        found |= {f"{path}.feed_forward.{part}_proj.weight": (14336, 4096) for part in ("gate", "up")}
        found[f"{path}.feed_forward.down_proj.weight"] = (4096, 14336)
        if layer in ATTENTION:
            found |= attention(f"{path}.self_attn", 4096, 32, 8, 128)
        else:
            found |= mamba2_mixer(f"{path}.mamba", 4096, 128, 64, 1, 128)
    return found


PUBLISHED = {
    "Bamba-9B": Published(CONFIG, "9.78B", tensors(), 29 * mamba2_state(128, 64, 1, 128), 3 * 2 * 2 * 8 * 128),
}
