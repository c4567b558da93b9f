"""Qwen3-Next, and Qwen3.5 without its vision tower and its multi-token prediction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.models.configurations.published import Published, Shapes

KEYS, WIDTH, HEAD = 16, 128, 256
"""Equal in all sizes: key heads of a gated delta net, the size of its heads, and the size of attention's heads."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. experts: (number, number per token, intermediate size, which is also the shared expert's)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    values: int
    vocabulary: int
    mlp: int = 0
    experts: tuple[int, int, int] | None = None
    tied: bool = False

    @property
    def state(self) -> int:
        """Bytes of a state in float32: three steps of the convolution's input, and the recurrent state."""
        channels = (2 * KEYS + self.values) * WIDTH
        return self.layers * 3 // 4 * 4 * (3 * channels + self.values * WIDTH * WIDTH)

    @property
    def kv(self) -> int:
        return self.layers // 4 * 2 * 2 * self.kv_heads * HEAD

    def config(self) -> dict[str, Any]:
        """Return the config keys that Qwen3-Next and Qwen3.5 share."""
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "vocab_size": self.vocabulary}
        sizes |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": HEAD}
        sizes |= {"linear_num_key_heads": KEYS, "linear_num_value_heads": self.values, "linear_conv_kernel_dim": 4}
        sizes |= {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH, "max_position_embeddings": 262144}
        if self.experts:
            sizes |= dict(
                zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), self.experts, strict=True)
            )
            sizes["shared_expert_intermediate_size"] = self.experts[2]
        if self.mlp:
            sizes["intermediate_size"] = self.mlp
        others = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": self.tied}
        return {**sizes, **others, "full_attention_interval": 4}

    def tensors(self, prefix: str, delta: Callable[[str, "Shape"], Shapes], stacked: bool) -> Shapes:
        found: Shapes = {
            f"{prefix}.embed_tokens.weight": (self.vocabulary, self.hidden),
            f"{prefix}.norm.weight": (self.hidden,),
        }
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            path = f"{prefix}.layers.{layer}"
            found |= {
                f"{path}.{norm}.weight": (self.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
            }
            found |= self.attention(f"{path}.self_attn") if layer % 4 == 3 else delta(f"{path}.linear_attn", self)
            found |= self.mixture(f"{path}.mlp", stacked) if self.experts else self.gated(f"{path}.mlp", self.mlp)
        return found

    def attention(self, path: str) -> Shapes:
        return {
            f"{path}.q_proj.weight": (2 * self.heads * HEAD, self.hidden),
            f"{path}.k_proj.weight": (self.kv_heads * HEAD, self.hidden),
            f"{path}.v_proj.weight": (self.kv_heads * HEAD, self.hidden),
            f"{path}.o_proj.weight": (self.hidden, self.heads * HEAD),
            f"{path}.q_norm.weight": (HEAD,),
            f"{path}.k_norm.weight": (HEAD,),
        }

    def gated(self, path: str, inner: int) -> Shapes:
        return {
            f"{path}.gate_proj.weight": (inner, self.hidden),
            f"{path}.up_proj.weight": (inner, self.hidden),
            f"{path}.down_proj.weight": (self.hidden, inner),
        }

    def mixture(self, path: str, stacked: bool) -> Shapes:
        assert self.experts
        count, _, inner = self.experts
        found = {f"{path}.gate.weight": (count, self.hidden), f"{path}.shared_expert_gate.weight": (1, self.hidden)}
        found |= self.gated(f"{path}.shared_expert", inner)
        if stacked:
            found[f"{path}.experts.gate_up_proj"] = (count, 2 * inner, self.hidden)
            found[f"{path}.experts.down_proj"] = (count, self.hidden, inner)
            return found
        for expert in range(count):
            found |= self.gated(f"{path}.experts.{expert}", inner)
        return found


def of_every_delta_net(path: str, s: Shape) -> Shapes:
    return {
        f"{path}.A_log": (s.values,),
        f"{path}.dt_bias": (s.values,),
        f"{path}.conv1d.weight": ((2 * KEYS + s.values) * WIDTH, 1, 4),
        f"{path}.norm.weight": (WIDTH,),
        f"{path}.out_proj.weight": (s.hidden, s.values * WIDTH),
    }


def interleaved(path: str, s: Shape) -> Shapes:
    return of_every_delta_net(path, s) | {
        f"{path}.in_proj_qkvz.weight": (2 * (KEYS + s.values) * WIDTH, s.hidden),
        f"{path}.in_proj_ba.weight": (2 * s.values, s.hidden),
    }


def apart(path: str, s: Shape) -> Shapes:
    return of_every_delta_net(path, s) | {
        f"{path}.in_proj_qkv.weight": ((2 * KEYS + s.values) * WIDTH, s.hidden),
        f"{path}.in_proj_z.weight": (s.values * WIDTH, s.hidden),
        f"{path}.in_proj_b.weight": (s.values, s.hidden),
        f"{path}.in_proj_a.weight": (s.values, s.hidden),
    }


def qwen3_next(size: str, shape: Shape) -> Published:
    config = {
        **shape.config(), "model_type": "qwen3_next", "torch_dtype": "bfloat16", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25, "rope_scaling": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "intermediate_size": 5120,
    }  # fmt: skip
    left_out = {"mtp.fc.weight": (shape.hidden, 2 * shape.hidden), "mtp.norm.weight": (shape.hidden,)}
    return Published(config, size, shape.tensors("model", interleaved, stacked=False), shape.state, shape.kv, left_out)


def qwen3_5(size: str, shape: Shape) -> Published:
    kind = "qwen3_5_moe" if shape.experts else "qwen3_5"
    rope = {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    text = {
        **shape.config(), "model_type": f"{kind}_text", "dtype": "bfloat16", "rope_parameters": rope,
        "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    config = {"model_type": kind, "text_config": text, "vision_config": {"depth": 27, "hidden_size": 1152}}
    left_out = {
        "mtp.fc.weight": (shape.hidden, 2 * shape.hidden),
        "mtp.layers.0.self_attn.q_norm.weight": (HEAD,),
        "model.visual.patch_embed.proj.bias": (1152,),
        "model.visual.blocks.0.attn.qkv.weight": (3 * 1152, 1152),
    }
    tensors = shape.tensors("model.language_model", apart, stacked=True)
    tied = {"tie_word_embeddings": shape.tied}
    return Published({**config, **tied}, size, tensors, shape.state, shape.kv, left_out)


PUBLISHED = {
    "Qwen3-Next-80B-A3B-Instruct": qwen3_next("80B", Shape(2048, 48, 16, 2, 32, 151936, experts=(512, 10, 512))),
    "Qwen3.5-0.8B": qwen3_5("0.8B", Shape(1024, 24, 8, 2, 16, 248320, mlp=3584, tied=True)),
    "Qwen3.5-2B": qwen3_5("2B", Shape(2048, 24, 8, 2, 16, 248320, mlp=6144, tied=True)),
    "Qwen3.5-4B": qwen3_5("4B", Shape(2560, 32, 16, 4, 32, 248320, mlp=9216, tied=True)),
    "Qwen3.5-9B": qwen3_5("9B", Shape(4096, 32, 16, 4, 32, 248320, mlp=12288)),
    "Qwen3.5-27B": qwen3_5("27B", Shape(5120, 64, 24, 4, 48, 248320, mlp=17408)),
    "Qwen3.5-35B-A3B": qwen3_5("35B", Shape(2048, 40, 16, 2, 32, 248320, experts=(256, 8, 512))),
    "Qwen3.5-122B-A10B": qwen3_5("122B", Shape(3072, 48, 32, 2, 64, 248320, experts=(256, 8, 1024))),
    # The name includes the vision tower, which has another half billion parameters.
    "Qwen3.5-397B-A17B": qwen3_5("396B", Shape(4096, 60, 32, 2, 64, 248320, experts=(512, 10, 1024))),
}
