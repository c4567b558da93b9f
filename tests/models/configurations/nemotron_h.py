"""Nemotron-H and Nemotron Nano 2."""

from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


def config(pattern: str, hidden: int, heads: int, mamba_width: int, mlp: int, length: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
        "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": mamba_width, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "chunk_size": 128, "expand": 2, "vocab_size": 131072, "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False,
        "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5,
        "residual_in_fp32": False, "sliding_window": None, "tie_word_embeddings": False,
        "time_step_limit": [0.0, float("inf")], "max_position_embeddings": length, "torch_dtype": "bfloat16",
    }  # fmt: skip


def tensors(pattern: str, hidden: int, heads: int, mamba_width: int, mlp: int) -> Shapes:
    found: Shapes = {
        "backbone.embeddings.weight": (131072, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (131072, hidden),
    }
    for layer, kind in enumerate(pattern):
        path = f"backbone.layers.{layer}"
        found[f"{path}.norm.weight"] = (hidden,)
        if kind == "M":
            found |= mamba2_mixer(f"{path}.mixer", hidden, 128, mamba_width, 8, 128)
        elif kind == "*":
            found |= attention(f"{path}.mixer", hidden, heads, 8, 128)
        else:
            found[f"{path}.mixer.up_proj.weight"] = (mlp, hidden)
            found[f"{path}.mixer.down_proj.weight"] = (hidden, mlp)
    return found


def dense(size: str, pattern: str, hidden: int, heads: int, mamba_width: int, mlp: int, length: int) -> Published:
    state, kv = pattern.count("M") * mamba2_state(128, mamba_width, 8, 128), pattern.count("*") * 2 * 2 * 8 * 128
    shapes = tensors(pattern, hidden, heads, mamba_width, mlp)
    return Published(config(pattern, hidden, heads, mamba_width, mlp, length), size, shapes, state, kv)


PUBLISHED = {
    "Nemotron-H-8B-Base-8K": dense("8.1B", NEMOTRON_H_8B, 4096, 32, 64, 21504, 8192),
    "NVIDIA-Nemotron-Nano-9B-v2": dense("8888227328", NANO_9B, 4480, 40, 80, 15680, 131072),
}
