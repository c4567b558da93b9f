"""Ling 3 (transformers' BailingHybridForCausalLM): Kimi Delta Attention, gated latent attention, and experts."""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, numbered
from baton.models.families.kimi_linear import CONVOLVED, KINDS, MLPS, KimiMixture, checked, latent_pieces
from baton.models.families.qwen3_next import pieces_of_experts
from baton.models.family import Family, Piece, gated_mlp, is_of_head, rows_of
from baton.models.layers.kda import KdaMixer, KdaSettings
from baton.models.layers.mla import LatentAttention, LatentSettings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import RotationSettings, read_rotation

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
PROJECTED = re.compile(r"(.*)\.(q|k|v|b|g)_proj\.weight")
RENAMED = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".self_attn.forget_gate.": ".self_attn.",
    ".gate.expert_bias": ".gate.e_score_correction_bias",
}
"""Parts of names in files, those of the authors and of transformers → parts of names here."""
SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "architectures": (["BailingMoeV3ForCausalLM"], ["BailingHybridForCausalLM"]),  # Ling 2.5 has other layers
    "score_function": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_router_enable_expert_bias": (True,),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "rope_interleave": (True,),
    "no_kda_lora": (True,),
    **dict.fromkeys(("use_kda_lora", "use_mla_nope", "use_bias", "use_qkv_bias"), (False,)),
    **dict.fromkeys(("scale_router_input", "up_proj_norm", "value_norm", "use_nGPT"), (False,)),
}
"""Keys of the authors' files, which transformers does not read → values that mean what is computed here."""
DEFAULTS = {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
"""How experts are chosen and weighed. The defaults of kimi_linear.py:KimiMixture are those of another model."""
CLAMPED = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    check(config)
    kinds, kda, attention = read_layers(config), read_kda(config, state_dtype), read_attention(config)
    outline = Outline(
        max_position=config.integer("model_max_length", "max_position_embeddings", default=262144),
        chunk_size=CHUNK,
        kernel=kda.kernel,
        states=kda.state_specs() * kinds.count("linear_attention"),
        rings=[kda.ring_spec(dtype)] * kinds.count("linear_attention"),
        pages=attention.kv_specs(dtype) * kinds.count("full_attention"),
        rotate=[read_rotate(config, attention.shared).of],
        forms=attention.forms(),
    )

    def norm() -> RMSNorm:
        return RMSNorm(kda.hidden, kda.eps, dtype)

    def mixer(kind: str, index: int) -> nn.Module:
        if kind == "linear_attention":
            return KdaMixer(kda, index, dtype)
        return LatentAttention(attention, index, dtype)

    def mlp(kind: str) -> nn.Module:
        if kind == "sparse":
            return KimiMixture(config.with_defaults(DEFAULTS), dtype)
        return GatedMLP(kda.hidden, config.integer("intermediate_size"), dtype)

    blocks = [
        Block(input_layernorm=norm(), self_attn=mixer(*kind), post_attention_layernorm=norm(), mlp=mlp(mlp_kind))
        for kind, mlp_kind in zip(numbered(kinds), read_mlps(config), strict=True)
    ]
    return Decoder(config, outline, blocks, norm(), dtype)


def check(config: ModelConfig) -> None:
    """Raise ModelError for settings that would change the computation."""
    for name, values in SUPPORTED.items():
        config.require(name, *values)
    config.require("num_key_value_heads", config.integer("num_attention_heads"))
    config.require("moe_shared_expert_intermediate_size", config.integer("moe_intermediate_size"))
    for name in CLAMPED:
        if any(config.values.get(name) or ()):
            raise ModelError(f"config.json: {name} is not supported: activations of experts are not clamped")


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: by default, the last one of each group of layers has latent attention.

    Raises ModelError if the last group is not whole, because implementations differ in its layers.
    """
    kinds, layers = config.strings("layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        group = config.integer("layer_group_size", default=6)
        if layers % group:
            raise ModelError(
                f"config.json: num_hidden_layers = {layers} should be a multiple of layer_group_size = {group}, "
                "unless there are layer_types"
            )
        kinds = [KINDS[layer % group == 0] for layer in range(1, layers + 1)]
    return checked(kinds, layers, "layer_types", KINDS)


def read_mlps(config: ModelConfig) -> list[str]:
    """Return the kind of each layer's MLP: dense, or sparse if it has experts."""
    kinds, layers = config.strings("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        dense = config.integer("first_k_dense_replace", default=2, least=0)
        kinds = [MLPS[layer >= dense] for layer in range(layers)]
    return checked(kinds, layers, "mlp_layer_types", MLPS)


def read_kda(config: ModelConfig, state_dtype: torch.dtype) -> KdaSettings:
    """Read the sizes of KDA layers. In files of transformers, head_dim is the number of rotated numbers instead."""
    return KdaSettings(
        hidden=config.integer("hidden_size"),
        heads=config.integer("linear_num_heads", "num_attention_heads"),
        width=config.integer("linear_head_dim", "head_dim"),
        kernel=config.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        eps=config.number("rms_norm_eps", default=1e-6),
        state_dtype=state_dtype,
        full_rank=True,
        lower_bound=read_lower_bound(config),
    )


def read_lower_bound(config: ModelConfig) -> float | None:
    """Return the lower bound of log decays; None if they are unbounded."""
    if not config.flag("kda_safe_gate", default=True):
        return None
    bound = config.values.get("kda_lower_bound", -5.0)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -math.inf < bound < 0:
        raise ModelError(f"config.json: kda_lower_bound should be a finite number below 0, not {bound!r}")
    return float(bound)


def read_attention(config: ModelConfig) -> LatentSettings:
    return LatentSettings(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        own=config.integer("qk_nope_head_dim"),
        shared=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
        rank=config.integer("kv_lora_rank"),
        query_rank=None if config.values.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        bias=config.flag("attention_bias", default=False),
        gated=True,
    )


def read_rotate(config: ModelConfig, shared: int) -> RotationSettings:
    """Read the rotation of the shared part of keys. All of it is rotated; files name it as a share of head_dim."""
    values, rope = {**config.values, "partial_rotary_factor": None}, config.values.get("rope_parameters")
    if values.get("rope_theta") is None:
        values["rope_theta"] = 6e6
    if isinstance(rope, dict):
        left_out = {"partial_rotary_factor"} | {name for name, value in rope.items() if value is None}
        values["rope_parameters"] = {name: value for name, value in rope.items() if name not in left_out}
    return read_rotation(ModelConfig(values), shared)


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills; [] for layers that predict further tokens."""
    for part, other in RENAMED.items():
        name = name.replace(part, other)
    layer = LAYER.match(name)
    if is_of_head(name) or (layer and int(layer[1]) >= config.integer("num_hidden_layers")):
        return []
    if layer and ".self_attn." in name:
        if read_layers(config)[int(layer[1])] == "linear_attention":
            return kda_pieces(name, read_kda(config, torch.float32))
        return attention_pieces(name, read_attention(config))
    if ".experts." in name:
        return pieces_of_experts(name)
    return gated_mlp(name) or [Piece(name)]


def kda_pieces(name: str, s: KdaSettings) -> list[Piece]:
    """Return which parameters a tensor of a KDA layer fills. Its convolutions are joined, and most projections."""
    if match := PROJECTED.fullmatch(name):
        return [Piece(f"{match[1]}.in_proj.weight", place=rows_of(s.rows[match[2]]))]
    if match := CONVOLVED.fullmatch(name):
        part = "qkv".index(match[2])
        return [Piece(f"{match[1]}.conv1d.weight", place=rows_of(slice(part * s.inner, (part + 1) * s.inner)))]
    if name.endswith(".A_log"):
        return [Piece(name, take=torch.flatten)]
    return [Piece(name)]


def attention_pieces(name: str, s: LatentSettings) -> list[Piece]:
    """Return which parameters a tensor of latent attention fills."""
    owner, _, part = name.rpartition(".")[0].rpartition(".")
    if part in ("q_proj", "q_b_proj"):
        return [Piece(name, take=in_halves(s.heads, s.own))]
    if part == "kv_a_proj_with_mqa":
        return [Piece(name, take=in_halves(1, s.rank))]
    return latent_pieces(owner, s) if part == "kv_b_proj" else [Piece(name)]


def in_halves(groups: int, unchanged: int) -> Callable[[Tensor], Tensor]:
    """Return a Piece.take that reorders the rows whose results are rotated: first the even ones, then the odd ones.

    Files pair adjacent rows, and layers/rope.py pairs the halves.
    groups: the number of groups of rows, which have equal sizes. unchanged: rows of a group before those.
    """

    def take(weight: Tensor) -> Tensor:
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        turned = grouped[:, unchanged:]
        return torch.cat([grouped[:, :unchanged], turned[:, ::2], turned[:, 1::2]], dim=1).flatten(0, 1)

    return take


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
