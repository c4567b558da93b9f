"""Nemotron-H and Nemotron Nano 2."""

from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
NEMOTRON_H_56B = "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
NANO_12B = "M-M-M-M" + 6 * "*-M-M-M-M" + "-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


# Of a mixer: heads, width and state.
Mamba = tuple[int, int, int]
SMALL, WIDE, LARGE = (128, 64, 128), (128, 80, 128), (256, 64, 256)


def config(pattern: str, hidden: int, heads: int, mamba: Mamba, mlp: int, length: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
        "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": mamba[0], "mamba_head_dim": mamba[1], "ssm_state_size": mamba[2],
        "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "expand": 2, "vocab_size": 131072,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False,
        "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5, "residual_in_fp32": False, "sliding_window": None, "tie_word_embeddings": False,
        "time_step_limit": [0.0, float("inf")], "max_position_embeddings": length, "torch_dtype": "bfloat16",
    }  # fmt: skip


def tensors(pattern: str, hidden: int, heads: int, mamba: Mamba, mlp: int) -> Shapes:
    found: Shapes = {
        "backbone.embeddings.weight": (131072, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (131072, hidden),
    }
    for layer, kind in enumerate(pattern):
        path = f"backbone.layers.{layer}"
        found[f"{path}.norm.weight"] = (hidden,)
        if kind == "M":
            found |= mamba2_mixer(f"{path}.mixer", hidden, mamba[0], mamba[1], 8, mamba[2])
        elif kind == "*":
            found |= attention(f"{path}.mixer", hidden, heads, 8, 128)
        else:
            found[f"{path}.mixer.up_proj.weight"] = (mlp, hidden)
            found[f"{path}.mixer.down_proj.weight"] = (hidden, mlp)
    return found


def dense(size: str, pattern: str, hidden: int, heads: int, mamba: Mamba, mlp: int, length: int) -> Published:
    state = pattern.count("M") * mamba2_state(mamba[0], mamba[1], 8, mamba[2])
    shapes, kv = tensors(pattern, hidden, heads, mamba, mlp), pattern.count("*") * 2 * 2 * 8 * 128
    return Published(config(pattern, hidden, heads, mamba, mlp, length), size, shapes, state, kv)


PUBLISHED = {
    "Nemotron-H-8B-Base-8K": dense("8.1B", NEMOTRON_H_8B, 4096, 32, SMALL, 21504, 8192),
    "Nemotron-H-47B-Base-8K": dense("47B", NEMOTRON_H_47B, 8192, 64, LARGE, 30720, 8192),
    "Nemotron-H-56B-Base-8K": dense("56B", NEMOTRON_H_56B, 8192, 64, LARGE, 32768, 8192),
    "NVIDIA-Nemotron-Nano-9B-v2": dense("8888227328", NANO_9B, 4480, 40, WIDE, 15680, 131072),
    "NVIDIA-Nemotron-Nano-12B-v2": dense("12.31B", NANO_12B, 5120, 40, WIDE, 20480, 131072),
}
