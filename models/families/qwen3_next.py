"""Qwen3-Next (transformers' Qwen3NextForCausalLM): gated delta nets alternating with gated attention, and experts."""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig
from baton.models.decoder import Block, Decoder, Outline, checked_kinds, numbered
from baton.models.family import Family, Piece, expert_pieces, gated_mlp, is_of_head, rows_of
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.delta import DeltaMixer, DeltaSettings
from baton.models.layers.experts import Experts, SoftmaxRouter
from baton.models.layers.linear import Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.prediction import SEEN_FROM, PredictionHead
from baton.models.layers.rope import read_rotation
from baton.models.layers.step import BatchPlan

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
KINDS = ("linear_attention", "full_attention")
ROTATED = 0.25  # the default share of a head's numbers that is rotated
EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
STACKS = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
HEAD_NORMS = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm"}


class SparseMLP(nn.Module):
    """A mixture of routed experts, plus one shared expert for all tokens. A sigmoid gate scales the shared output."""

    def __init__(self, config: ModelConfig, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, renormalise = config.integer("hidden_size"), config.flag("norm_topk_prob", default=True)
        self.gate = SoftmaxRouter(hidden, experts, config.integer("num_experts_per_tok"), renormalise, dtype, True)
        self.experts = Experts(hidden, config.integer("moe_intermediate_size"), experts, "silu_gated", dtype)
        self.shared_expert = GatedMLP(hidden, config.integer("shared_expert_intermediate_size"), dtype)
        self.shared_expert_gate = Linear(hidden, 1, False, dtype, 1)  # never quantized

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        routed = self.experts(x, *self.gate(x, step.padding))
        return add_shared(routed, self.shared_expert(x), self.shared_expert_gate(x))


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    config.require("attn_output_gate", True)
    config.require("output_gate_type", "silu", "swish")
    kinds, delta, attention = read_layers(config), read_delta(config, state_dtype), read_attention(config)
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=32768),
        chunk_size=CHUNK,
        kernel=delta.kernel,
        states=delta.state_specs() * kinds.count("linear_attention"),
        rings=[delta.ring_spec(dtype)] * kinds.count("linear_attention"),
        pages=attention.kv_specs(dtype) * (kinds.count("full_attention") + config.has_head),
        rotate=[read_rotation(config, attention.head_dim, ROTATED).of],
    )

    def norm() -> RMSNorm:
        return RMSNorm(delta.hidden, delta.eps, dtype, offset=1.0)

    def block(mlp: nn.Module, **mixer: nn.Module) -> Block:
        return Block(input_layernorm=norm(), **mixer, post_attention_layernorm=norm(), mlp=mlp)

    blocks, head = list[Block](), None
    for layer, (kind, index) in enumerate(numbered(kinds)):
        mlp = read_mlp(config, layer, dtype)
        if kind == "linear_attention":
            blocks.append(block(mlp, linear_attn=DeltaMixer(delta, index, dtype)))
        else:
            blocks.append(block(mlp, self_attn=Attention(attention, index, dtype)))
    if config.has_head:
        mixer = Attention(replace(attention, seen_from=SEEN_FROM), kinds.count("full_attention"), dtype)
        last = [block(read_mlp(config, len(kinds), dtype), self_attn=mixer)]
        head = PredictionHead(delta.hidden, (norm(), norm(), norm()), last, dtype)
    return Decoder(config, outline, blocks, norm(), dtype, head=head)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: linear_attention or full_attention."""
    kinds, interval = config.strings("layer_types"), config.integer("full_attention_interval", default=4)
    if kinds is None:
        layers = range(1, config.integer("num_hidden_layers") + 1)
        kinds = [KINDS[layer % interval == 0] for layer in layers]
    return checked_kinds(kinds, *KINDS)


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
    return AttentionSettings.from_config(config, norm_eps=read_eps(config), gated=True)


def read_mlp(config: ModelConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    """Build a layer's MLP.

    If the model has experts, each decoder_sparse_step-th layer that is not in mlp_only_layers is a mixture of experts.
    """
    hidden, experts = config.integer("hidden_size"), config.integer("num_experts", least=0)
    dense = config.indices("mlp_only_layers", len(read_layers(config)))
    if experts and layer not in dense and (layer + 1) % config.integer("decoder_sparse_step", default=1) == 0:
        return SparseMLP(config, experts, dtype)
    return GatedMLP(hidden, config.integer("intermediate_size"), dtype)


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills; [] for a head for multi-token prediction not to load.

    Some projections are split into several parameters, and some are joined into one.
    """
    if is_of_head(name):
        if not config.has_head:
            return []
        name = name.removeprefix("model.")
    path, _, leaf = name.rpartition(".")
    owner, _, layer = path.rpartition(".")
    if layer.startswith("in_proj_"):
        return delta_pieces(
            f"{owner}.in_proj.{leaf}", layer.removeprefix("in_proj_"), read_delta(config, torch.float32)
        )
    if layer == "q_proj":
        return gated_pieces(owner, leaf, read_attention(config))
    if layer in HEAD_NORMS:
        return [Piece(f"{owner}.{HEAD_NORMS[layer]}.{leaf}")]
    if ".experts." in name:
        return pieces_of_experts(name)
    return gated_mlp(name) or [Piece(name)]


def delta_pieces(parameter: str, projected: str, s: DeltaSettings) -> list[Piece]:
    """Return which rows of the mixer's single in_proj a stored projection, such as in_proj_qkv, fills.

    parameter: the name of in_proj's weight or bias.
    projected: the letters after in_proj_ in the stored name, one for each output of the projection. In Qwen3-Next's
    projections (qkvz and ba), the rows of each key head are together. In Qwen3.5's, all rows of q come first, then all
    rows of k, and so on.
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
    """Return which parameters q_proj fills. For each head, it holds the rows of the query, then of the gate."""
    widths = [s.head_dim, s.head_dim]
    return [
        Piece(f"{owner}.q_proj.{leaf}", take=part_of_groups(s.heads, widths, 0)),
        Piece(f"{owner}.gate_proj.{leaf}", take=part_of_groups(s.heads, widths, 1)),
    ]


def pieces_of_experts(name: str) -> list[Piece]:
    """Return which parameters a stored weight of experts fills. Files hold experts one by one, or stacked."""
    path, _, leaf = name.rpartition(".")
    if leaf in STACKS:
        return [Piece(f"{path}.{STACKS[leaf]}")]
    match = EXPERT.fullmatch(name)
    return [Piece(name)] if match is None else expert_pieces(match[1], int(match[2]), match[3])


def part_of_groups(groups: int, widths: list[int], index: int) -> Callable[[Tensor], Tensor]:
    """Return a Piece.take that joins the part `index` of every group of rows.

    groups: the number of groups, which have equal sizes and follow one another.
    widths: the number of rows of each part of a group.
    """

    def take(weight: Tensor) -> Tensor:
        grouped = weight.reshape(groups, sum(widths), *weight.shape[1:])
        return torch.split(grouped, widths, dim=1)[index].flatten(0, 1)

    return take


FAMILY = Family(build, pieces, "model.embed_tokens.weight", can_have_head=True)
