"""Falcon-H1."""

from dataclasses import dataclass
from typing import Any

from tests.models.configurations.published import Published, Shapes, attention, mamba2_mixer, mamba2_state


@dataclass(frozen=True)
class FalconShape:
    """Sizes of a model. heads, kv_heads and width belong to attention; mamba is (heads, width, groups, state)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    mlp: int
    mamba: tuple[int, int, int, int]
    normed: bool
    vocabulary: int
    length: int

    def config(self) -> dict[str, Any]:
        heads, width, groups, state = self.mamba
        return {
            "model_type": "falcon_h1", "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.width,
            "intermediate_size": self.mlp, "mamba_n_heads": heads, "mamba_d_head": width, "mamba_n_groups": groups,
            "mamba_d_state": state, "mamba_d_ssm": heads * width, "mamba_expand": 2, "mamba_d_conv": 4,
            "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": self.normed,
            "mamba_norm_before_gate": False, "mamba_use_mlp": True, "mamba_chunk_size": 128,
            "attn_layer_indices": None, "projectors_bias": False, "attention_bias": False, "mlp_bias": False,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e11, "rope_scaling": None,
            "tie_word_embeddings": False, "vocab_size": self.vocabulary, "max_position_embeddings": self.length,
            "torch_dtype": "bfloat16",
        }  # fmt: skip

    def tensors(self) -> Shapes:
        found: Shapes = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.final_layernorm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }
        for layer in range(self.layers):
            path = f"model.layers.{layer}"
            found |= {f"{path}.{norm}.weight": (self.hidden,) for norm in ("input_layernorm", "pre_ff_layernorm")}
            found |= mamba2_mixer(f"{path}.mamba", self.hidden, *self.mamba)
            found |= attention(f"{path}.self_attn", self.hidden, self.heads, self.kv_heads, self.width)
            found |= {f"{path}.feed_forward.{part}_proj.weight": (self.mlp, self.hidden) for part in ("gate", "up")}
            found[f"{path}.feed_forward.down_proj.weight"] = (self.hidden, self.mlp)
            if not self.normed:
                del found[f"{path}.mamba.norm.weight"]
        return found

    def published(self, size: str, **multipliers: Any) -> Published:
        state, kv = self.layers * mamba2_state(*self.mamba), self.layers * 2 * 2 * self.kv_heads * self.width
        return Published(self.config() | multipliers, size, self.tensors(), state, kv)


PUBLISHED = {
    "Falcon-H1-0.5B-Instruct": FalconShape(1024, 36, 8, 2, 64, 2048, (24, 64, 1, 128), False, 32784, 16384).published(
        "521411104",
        attention_in_multiplier=1.0,
        attention_out_multiplier=0.9375,
        embedding_multiplier=5.656854249492381,
        key_multiplier=0.390625,
        lm_head_multiplier=0.0390625,
        mlp_multipliers=[0.8838834764831844, 0.5859375],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23570226039551587,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ),
    "Falcon-H1-1.5B-Instruct": FalconShape(2048, 24, 8, 2, 128, 4608, (48, 64, 1, 256), True, 65537, 131072).published(
        "1554863488"
    ),
    "Falcon-H1-1.5B-Deep-Instruct": FalconShape(
        1280, 66, 6, 2, 128, 3072, (24, 64, 1, 256), True, 65537, 131072
    ).published("1.55B"),
    "Falcon-H1-3B-Instruct": FalconShape(2560, 32, 10, 2, 128, 6144, (32, 128, 1, 256), True, 65537, 131072).published(
        "3.15B"
    ),
    "Falcon-H1-7B-Instruct": FalconShape(
        3072, 44, 12, 2, 128, 12288, (24, 128, 1, 256), True, 130049, 262144
    ).published("7585654880"),
    "Falcon-H1-34B-Instruct": FalconShape(
        5120, 72, 20, 4, 128, 21504, (32, 128, 2, 256), True, 261120, 262144
    ).published("33642516224"),
}
