"""Models of Ling 3.

Ling-3.0-flash has the sizes that are the defaults of transformers' BailingHybridConfig, which names it as their source.
Ling-3.0-tiny has the defaults of SGLang-JAX's BailingMoeV3Config, which is adapted from the published one.
The numbers of parameters, 124B and 7.9B, are as other engines describe the models (AtomicBot-ai's llama.cpp, pull
request 63; Rapid-MLX, pull request 1817). The tensors have the names that transformers renames when it loads the files.
"""

from dataclasses import dataclass
from typing import Any

from tests.models.configurations.published import Published, Shapes

VOCABULARY, WIDTH, RANK, ROTATED = 157184, 128, 512, 64
"""WIDTH: numbers of a head. RANK: numbers of a latent. ROTATED: numbers of the part of a key that heads share."""


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    group: int  # layers of a group, whose last one has latent attention
    heads: int
    dense: int  # number of layers without experts
    wide: int  # inner size of these
    experts: int
    inner: int  # inner size of an expert
    query_rank: int | None

    @property
    def full(self) -> list[int]:
        return [*range(self.group - 1, self.layers, self.group)]

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "layer_group_size": self.group, "vocab_size": VOCABULARY,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads, "head_dim": WIDTH,
            "intermediate_size": self.wide, "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_qk_norm": True,
            "kv_lora_rank": RANK, "q_lora_rank": self.query_rank, "qk_nope_head_dim": WIDTH,
            "qk_rope_head_dim": ROTATED, "v_head_dim": WIDTH, "rope_theta": 6000000, "rope_interleave": True,
            "partial_rotary_factor": 0.5, "gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True,
            "kda_safe_gate": True, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4,
            "first_k_dense_replace": self.dense, "num_experts": self.experts, "num_experts_per_tok": 8,
            "moe_intermediate_size": self.inner, "moe_shared_expert_intermediate_size": self.inner,
            "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
            "max_position_embeddings": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def tensors(self) -> Shapes:
        found: Shapes = {
            "model.word_embeddings.weight": (VOCABULARY, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (VOCABULARY, self.hidden),
        }
        for layer in range(self.layers):
            path = f"model.layers.{layer}"
            norms = ("input_layernorm", "post_attention_layernorm")
            found |= {f"{path}.{norm}.weight": (self.hidden,) for norm in norms}
            mixer = self.latent if layer in self.full else self.delta
            found |= mixer(f"{path}.attention")
            found |= self.gated(f"{path}.mlp", self.wide) if layer < self.dense else self.mixture(f"{path}.mlp")
        return found

    def delta(self, path: str) -> Shapes:
        inner = self.heads * WIDTH
        found: Shapes = {f"{path}.{part}_proj.weight": (inner, self.hidden) for part in "qkvfg"}
        found |= {f"{path}.{part}_conv1d.weight": (inner, 1, 4) for part in "qkv"}
        return found | {
            f"{path}.b_proj.weight": (self.heads, self.hidden),
            f"{path}.A_log": (1, 1, self.heads, 1),
            f"{path}.dt_bias": (inner,),
            f"{path}.o_norm.weight": (WIDTH,),
            f"{path}.o_proj.weight": (self.hidden, inner),
        }

    def latent(self, path: str) -> Shapes:
        queries = self.heads * (WIDTH + ROTATED)
        found: Shapes = {f"{path}.q_proj.weight": (queries, self.hidden)}
        if self.query_rank:
            found = {
                f"{path}.q_a_proj.weight": (self.query_rank, self.hidden),
                f"{path}.q_a_layernorm.weight": (self.query_rank,),
                f"{path}.q_b_proj.weight": (queries, self.query_rank),
            }
        return found | {
            f"{path}.kv_a_proj_with_mqa.weight": (RANK + ROTATED, self.hidden),
            f"{path}.kv_a_layernorm.weight": (RANK,),
            f"{path}.kv_b_proj.weight": (self.heads * 2 * WIDTH, RANK),
            f"{path}.g_proj.weight": (self.heads, self.hidden),
            f"{path}.dense.weight": (self.hidden, self.heads * WIDTH),
        }

    def mixture(self, path: str) -> Shapes:
        found: Shapes = {
            f"{path}.gate.weight": (self.experts, self.hidden),
            f"{path}.gate.expert_bias": (self.experts,),
        }
        for expert in range(self.experts):
            found |= self.gated(f"{path}.experts.{expert}", self.inner)
        return found | self.gated(f"{path}.shared_experts", self.inner)

    def gated(self, path: str, inner: int) -> Shapes:
        found: Shapes = {f"{path}.{part}_proj.weight": (inner, self.hidden) for part in ("gate", "up")}
        return found | {f"{path}.down_proj.weight": (self.hidden, inner)}

    def published(self, size: str) -> Published:
        """Return the facts. The layer after the last one, which predicts further tokens, is left out."""
        channels = self.heads * WIDTH
        state = (self.layers - len(self.full)) * 4 * (3 * 3 * channels + channels * WIDTH)
        further = self.latent(f"model.layers.{self.layers}.attention")
        kv = len(self.full) * 2 * (RANK + ROTATED)
        return Published(self.config(), size, self.tensors(), state, kv, further)


FLASH = Size(2560, 42, 6, 32, dense=2, wide=6144, experts=512, inner=768, query_rank=None)
TINY = Size(1536, 24, 4, 16, dense=1, wide=4608, experts=128, inner=512, query_rank=256)
PUBLISHED = {"Ling-3.0-flash": FLASH.published("124B"), "Ling-3.0-tiny": TINY.published("7.9B")}
