"""Qwen3-Next (transformers' Qwen3NextForCausalLM): gated delta nets, and attention with gated outputs between them."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, numbered
from baton.models.family import Family, Piece, expert_pieces, gated_mlp
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.delta import DeltaMixer, DeltaSettings
from baton.models.layers.experts import Experts, SoftmaxRouter
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import read_rotation
from baton.models.layers.step import BatchPlan

CHUNK = 64
KINDS = ("linear_attention", "full_attention")
ROTATED = 0.25
EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
STACKS = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}


class SparseMLP(nn.Module):
    """Routed experts, and one that all tokens share, by a gate."""

    def __init__(self, config: ModelConfig, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, renormalise = config.integer("hidden_size"), config.flag("norm_topk_prob", default=True)
        self.gate = SoftmaxRouter(hidden, experts, config.integer("num_experts_per_tok"), renormalise, dtype, True)
        self.experts = Experts(hidden, config.integer("moe_intermediate_size"), experts, "silu_gated", dtype)
        self.shared_expert = GatedMLP(hidden, config.integer("shared_expert_intermediate_size"), dtype)
        self.shared_expert_gate = Linear(hidden, 1, False, dtype)

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        routed = self.experts(x, *self.gate(x, step.padding))
        return add_shared(routed, self.shared_expert(x), self.shared_expert_gate(x))


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    config.require("attn_output_gate", True)
    config.require("output_gate_type", "silu", "swish")
    kinds, vocabulary = read_layers(config), config.integer("vocab_size")
    delta, attention = read_delta(config, state_dtype), read_attention(config)
    hidden, tied = delta.hidden, config.flag("tie_word_embeddings", default=False)
    outline = Outline(
        vocab_size=vocabulary,
        max_position=config.integer("max_position_embeddings", default=32768),
        chunk_size=CHUNK,
        kernel=delta.kernel,
        states=delta.state_specs() * kinds.count("linear_attention"),
        pages=attention.kv_specs(dtype) * kinds.count("full_attention"),
        rotate=read_rotation(config, attention.head_dim, ROTATED).of,
    )

    def norm() -> RMSNorm:
        return RMSNorm(hidden, read_eps(config), dtype, offset=1.0)

    def block(layer: int, kind: str, index: int) -> Block:
        """A mixer (`linear_attn` or `self_attn`), then an MLP or a mixture."""
        is_delta = kind == "linear_attention"
        mixer = DeltaMixer(delta, index, dtype) if is_delta else Attention(attention, index, dtype)
        mixed = {"linear_attn" if is_delta else "self_attn": mixer}
        return Block(
            input_layernorm=norm(), **mixed, post_attention_layernorm=norm(), mlp=read_mlp(config, layer, dtype)
        )

    return Decoder(
        outline,
        Embedding(vocabulary, hidden, tied, dtype),
        [block(layer, kind, index) for layer, (kind, index) in enumerate(numbered(kinds))],
        norm(),
        None if tied else Linear(hidden, vocabulary, False, dtype),
    )


def read_layers(config: ModelConfig) -> list[str]:
    """The kind of each layer: linear_attention or full_attention."""
    kinds, interval = config.strings("layer_types"), config.integer("full_attention_interval", default=4)
    if kinds is None:
        layers = range(1, config.integer("num_hidden_layers") + 1)
        kinds = [KINDS[layer % interval == 0] for layer in layers]
    if not kinds:
        raise ModelError("config.json: there are no layers")
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ModelError(f"config.json: unknown layers {', '.join(unknown)}")
    return kinds


def read_eps(config: ModelConfig) -> float:
    return config.number("rms_norm_eps", default=1e-6)


def read_delta(config: ModelConfig, state_dtype: torch.dtype) -> DeltaSettings:
    return DeltaSettings(
        hidden=config.integer("hidden_size"),
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        key_width=config.integer("linear_key_head_dim"),
        value_width=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        eps=read_eps(config),
        state_dtype=state_dtype,
    )


def read_attention(config: ModelConfig) -> AttentionSettings:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=hidden // heads)
    return AttentionSettings(
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=config.flag("attention_bias", default=False),
        norm_eps=read_eps(config),
        gated=True,
    )


def read_mlp(config: ModelConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    """Experts, where there are any, in every decoder_sparse_step-th layer but those that mlp_only_layers names."""
    hidden, experts = config.integer("hidden_size"), config.integer("num_experts", least=0)
    dense = config.indices("mlp_only_layers", len(read_layers(config)))
    if experts and layer not in dense and (layer + 1) % config.integer("decoder_sparse_step", default=1) == 0:
        return SparseMLP(config, experts, dtype)
    return GatedMLP(hidden, config.integer("intermediate_size"), dtype)


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Projections that are one in the files are taken apart, and others joined; multi-token prediction is left out."""
    if name.startswith(("mtp.", "model.mtp.")):
        return []
    path, _, leaf = name.rpartition(".")
    owner, _, layer = path.rpartition(".")
    if layer.startswith("in_proj_"):
        return delta_pieces(
            f"{owner}.in_proj.{leaf}", layer.removeprefix("in_proj_"), read_delta(config, torch.float32)
        )
    if layer == "q_proj":
        return gated_pieces(owner, leaf, read_attention(config))
    if ".experts." in name:
        return pieces_of_experts(name)
    return gated_mlp(name) or [Piece(name)]


def delta_pieces(parameter: str, projected: str, s: DeltaSettings) -> list[Piece]:
    """projected: the letters of what one of the files' projections makes, as in_proj_qkv.

    Those of Qwen3-Next (qkvz and ba) have the rows of each key head together.
    """
    per_key = s.value_heads // s.key_heads
    sizes = {"q": s.key_width, "k": s.key_width, "v": per_key * s.value_width, "z": per_key * s.value_width}
    sizes |= {"b": per_key, "a": per_key}
    if not set(projected) <= sizes.keys():
        return [Piece(f"{parameter}_{projected}")]
    groups = s.key_heads if projected in ("qkvz", "ba") else 1
    widths = [sizes[part] * s.key_heads // groups for part in projected]
    return [
        Piece(parameter, take=part_of_groups(groups, widths, index), place=rows_of(s.rows[part]))
        for index, part in enumerate(projected)
    ]


def gated_pieces(owner: str, leaf: str, s: AttentionSettings) -> list[Piece]:
    """q_proj has for each head the query's rows and then the gate's."""
    widths = [s.head_dim, s.head_dim]
    return [
        Piece(f"{owner}.q_proj.{leaf}", take=part_of_groups(s.heads, widths, 0)),
        Piece(f"{owner}.gate_proj.{leaf}", take=part_of_groups(s.heads, widths, 1)),
    ]


def pieces_of_experts(name: str) -> list[Piece]:
    """Files hold the experts one by one, or in stacks."""
    path, _, leaf = name.rpartition(".")
    if leaf in STACKS:
        return [Piece(f"{path}.{STACKS[leaf]}")]
    match = EXPERT.fullmatch(name)
    return [Piece(name)] if match is None else expert_pieces(match[1], int(match[2]), match[3])


def part_of_groups(groups: int, widths: list[int], index: int) -> Callable[[Tensor], Tensor]:
    """Of rows that lie in equal groups, each of parts of these widths, the parts `index`, side by side."""

    def take(weight: Tensor) -> Tensor:
        grouped = weight.reshape(groups, sum(widths), *weight.shape[1:])
        return torch.split(grouped, widths, dim=1)[index].flatten(0, 1)

    return take


def rows_of(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[rows]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
