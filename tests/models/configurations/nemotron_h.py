"""Nemotron-H, Nemotron Nano 2, and Nemotron 3 Nano and Super."""

from dataclasses import dataclass
from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
NEMOTRON_H_56B = "M-M-M-M" + 10 * "*-M-M-M-M-M" + "-"
NANO_12B = "M-M-M-M" + 6 * "*-M-M-M-M" + "-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER_120B = "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME"


# Sizes of a mixer: heads, width and state.
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


@dataclass(frozen=True)
class Sparse:
    """Sizes of a model with experts.

    inner: width of a routed expert. shared: width of the shared expert. latent: width of latents, 0 for none.
    """

    pattern: str
    hidden: int
    mamba_heads: int
    experts: int
    top_k: int
    inner: int
    shared: int
    latent: int
    scale: float

    def published(self, size: str, left_out: Shapes) -> Published:
        sizes = {
            "num_key_value_heads": 2, "moe_latent_size": self.latent or None, "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k, "n_shared_experts": 1, "moe_intermediate_size": self.inner,
            "moe_shared_expert_intermediate_size": self.shared, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": self.scale,
        }  # fmt: skip
        mamba = (self.mamba_heads, 64, 128)
        state = self.pattern.count("M") * mamba2_state(self.mamba_heads, 64, 8, 128)
        kv = self.pattern.count("*") * 2 * 2 * 2 * 128
        base = config(self.pattern, self.hidden, 32, mamba, self.inner, 262144)
        return Published({**base, **sizes}, size, self.tensors(), state, kv, left_out)

    def tensors(self) -> Shapes:
        found: Shapes = {
            "backbone.embeddings.weight": (131072, self.hidden),
            "backbone.norm_f.weight": (self.hidden,),
            "lm_head.weight": (131072, self.hidden),
        }
        for layer, kind in enumerate(self.pattern):
            path = f"backbone.layers.{layer}"
            found[f"{path}.norm.weight"] = (self.hidden,)
            if kind == "M":
                found |= mamba2_mixer(f"{path}.mixer", self.hidden, self.mamba_heads, 64, 8, 128)
            elif kind == "*":
                found |= attention(f"{path}.mixer", self.hidden, 32, 2, 128)
            else:
                found |= self.mixture(f"{path}.mixer")
        return found

    def mixture(self, path: str) -> Shapes:
        found: Shapes = {
            f"{path}.gate.weight": (self.experts, self.hidden),
            f"{path}.gate.e_score_correction_bias": (self.experts,),
            f"{path}.shared_experts.up_proj.weight": (self.shared, self.hidden),
            f"{path}.shared_experts.down_proj.weight": (self.hidden, self.shared),
        }
        if self.latent:
            found[f"{path}.fc1_latent_proj.weight"] = (self.latent, self.hidden)
            found[f"{path}.fc2_latent_proj.weight"] = (self.hidden, self.latent)
        width = self.latent or self.hidden
        for expert in range(self.experts):
            found[f"{path}.experts.{expert}.up_proj.weight"] = (self.inner, width)
            found[f"{path}.experts.{expert}.down_proj.weight"] = (width, self.inner)
        return found


NANO_3 = Sparse(NANO_30B, 2688, 64, experts=128, top_k=6, inner=1856, shared=3712, latent=0, scale=2.5)
SUPER_3 = Sparse(SUPER_120B, 4096, 128, experts=512, top_k=22, inner=2688, shared=5376, latent=1024, scale=5.0)
SUPER_3_MTP: Shapes = {
    "mtp.layers.0.eh_proj.weight": (4096, 8192),
    **{f"mtp.layers.0.{name}.weight": (4096,) for name in ("enorm", "hnorm", "norm")},
    **attention("mtp.layers.0.mixer", 4096, 32, 2, 128),
    **{f"mtp.layers.1.{name}.weight": (4096,) for name in ("norm", "final_layernorm")},
    **SUPER_3.mixture("mtp.layers.1.mixer"),
}

PUBLISHED = {
    "Nemotron-H-8B-Base-8K": dense("8.1B", NEMOTRON_H_8B, 4096, 32, SMALL, 21504, 8192),
    "Nemotron-H-47B-Base-8K": dense("47B", NEMOTRON_H_47B, 8192, 64, LARGE, 30720, 8192),
    "Nemotron-H-56B-Base-8K": dense("56B", NEMOTRON_H_56B, 8192, 64, LARGE, 32768, 8192),
    "NVIDIA-Nemotron-Nano-9B-v2": dense("8888227328", NANO_9B, 4480, 40, WIDE, 15680, 131072),
    "NVIDIA-Nemotron-Nano-12B-v2": dense("12.31B", NANO_12B, 5120, 40, WIDE, 20480, 131072),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": NANO_3.published("31.6B", {}),
    "NVIDIA-Nemotron-3-Super-120B-A12B": SUPER_3.published("121B", SUPER_3_MTP),
}
