"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano."""

from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
NEMOTRON_H_56B = "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
NANO_12B = "M-M-M-M" + 6 * "*-M-M-M-M" + "-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


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


def nano_3() -> Published:
    """With experts, and attention and mixers of other sizes than those before."""
    sizes = {"num_key_value_heads": 2, "mamba_num_heads": 64, "moe_latent_size": None, "num_experts_per_tok": 6}
    routed = {
        "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1856, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    found: Shapes = {
        "backbone.embeddings.weight": (131072, 2688),
        "backbone.norm_f.weight": (2688,),
        "lm_head.weight": (131072, 2688),
    }
    for layer, kind in enumerate(NANO_30B):
        path = f"backbone.layers.{layer}"
        found[f"{path}.norm.weight"] = (2688,)
        if kind == "M":
            found |= mamba2_mixer(f"{path}.mixer", 2688, 64, 64, 8, 128)
        elif kind == "*":
            found |= attention(f"{path}.mixer", 2688, 32, 2, 128)
        else:
            found |= experts(f"{path}.mixer", 2688, 128, 1856, 3712)
    state, kv = NANO_30B.count("M") * mamba2_state(64, 64, 8, 128), NANO_30B.count("*") * 2 * 2 * 2 * 128
    return Published(
        {**config(NANO_30B, 2688, 32, (64, 64, 128), 1856, 262144), **sizes, **routed}, "31.6B", found, state, kv
    )


def experts(path: str, hidden: int, count: int, inner: int, shared: int) -> Shapes:
    found: Shapes = {f"{path}.gate.weight": (count, hidden), f"{path}.gate.e_score_correction_bias": (count,)}
    named = {f"{path}.experts.{expert}": inner for expert in range(count)} | {f"{path}.shared_experts": shared}
    for expert, size in named.items():
        found[f"{expert}.up_proj.weight"] = (size, hidden)
        found[f"{expert}.down_proj.weight"] = (hidden, size)
    return found


PUBLISHED = {
    "Nemotron-H-8B-Base-8K": dense("8.1B", NEMOTRON_H_8B, 4096, 32, SMALL, 21504, 8192),
    "Nemotron-H-47B-Base-8K": dense("47B", NEMOTRON_H_47B, 8192, 64, LARGE, 30720, 8192),
    "Nemotron-H-56B-Base-8K": dense("56B", NEMOTRON_H_56B, 8192, 64, LARGE, 32768, 8192),
    "NVIDIA-Nemotron-Nano-9B-v2": dense("8888227328", NANO_9B, 4480, 40, WIDE, 15680, 131072),
    "NVIDIA-Nemotron-Nano-12B-v2": dense("12.31B", NANO_12B, 5120, 40, WIDE, 20480, 131072),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": nano_3(),
}
