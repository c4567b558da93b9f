"""Qwen3-Next (transformers' Qwen3NextForCausalLM): gated delta nets, and attention with gated outputs between them."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.shared_expert import add_shared
from models.batch import Batch, Pools, TensorSpec
from models.config import ModelConfig, ModelError
from models.family import Family, Piece, gated_mlp
from models.layers.attention import Attention, AttentionSettings
from models.layers.delta import DeltaMixer, DeltaSettings
from models.layers.experts import Experts, SoftmaxRouter
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import read_rotation
from models.layers.step import BatchPlan, plan_batch

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


class Block(nn.Module):
    """A mixer (`linear_attn` or `self_attn`), then an MLP."""

    def __init__(self, config: ModelConfig, mixer: DeltaMixer | Attention, mlp: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), read_eps(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype, offset=1.0)
        self.linear_attn = mixer if isinstance(mixer, DeltaMixer) else None
        self.self_attn = mixer if isinstance(mixer, Attention) else None
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype, offset=1.0)
        self.mlp = mlp

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """x, the output of the layer before, is not yet added to the residual; nor is what is returned with it."""
        residual, normed = self.input_layernorm(residual, x)
        mixed = self.self_attn(normed, step) if self.self_attn else self.linear_attn(normed, step)  # type: ignore[misc]
        residual, normed = self.post_attention_layernorm(residual, mixed)
        return residual, self.mlp(normed, step) if isinstance(self.mlp, SparseMLP) else self.mlp(normed)


class QwenDecoder(nn.Module):
    def __init__(self, config: ModelConfig, blocks: list[Block], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, tied = config.integer("hidden_size"), config.flag("tie_word_embeddings", default=False)
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden, tied, dtype)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(hidden, read_eps(config), dtype, offset=1.0)


class Qwen3Next(nn.Module):
    chunk_size = CHUNK

    def __init__(self, config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        super().__init__()
        config.require("hidden_act", "silu", "swish")
        config.require("attn_output_gate", True)
        config.require("output_gate_type", "silu", "swish")
        self.kinds = read_layers(config)
        self.vocab_size = config.integer("vocab_size")
        self.max_position = config.integer("max_position_embeddings", default=32768)
        self.dtype = dtype
        self.delta, self.attention = read_delta(config, state_dtype), read_attention(config)
        self.rotation = read_rotation(config, self.attention.head_dim, ROTATED)
        self.model = QwenDecoder(config, [self._block(config, layer) for layer in range(len(self.kinds))], dtype)
        tied = self.model.embed_tokens.tied
        self.lm_head = None if tied else Linear(self.delta.hidden, self.vocab_size, False, dtype)

    def _block(self, config: ModelConfig, layer: int) -> Block:
        return Block(config, self._mixer(layer), read_mlp(config, layer, self.dtype), self.dtype)

    def _mixer(self, layer: int) -> DeltaMixer | Attention:
        kind = self.kinds[layer]
        index = self.kinds[:layer].count(kind)
        if kind == "linear_attention":
            return DeltaMixer(self.delta, index, self.dtype)
        return Attention(self.attention, index, self.dtype)

    def state_specs(self) -> list[TensorSpec]:
        return self.delta.state_specs() * self.kinds.count("linear_attention")

    def kv_specs(self) -> list[TensorSpec]:
        return self.attention.kv_specs(self.dtype) * self.kinds.count("full_attention")

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.run(self.embed(batch.tokens), self.plan(batch, pools))

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        return plan_batch(batch, pools, CHUNK, self.delta.kernel, self.rotation.of)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(tokens)
        return embedded

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        x: Tensor | None = None
        for block in self.model.layers:
            residual, x = block(residual, x, step)
        hidden: Tensor = self.model.norm(residual, x)[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden) if self.lm_head else self.model.embed_tokens.logits(hidden)
        return logits.float()


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
        return expert_pieces(name)
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


def expert_pieces(name: str) -> list[Piece]:
    """Files hold the experts one by one, or in stacks."""
    path, _, leaf = name.rpartition(".")
    if leaf in STACKS:
        return [Piece(f"{path}.{STACKS[leaf]}")]
    match = EXPERT.fullmatch(name)
    if match is None:
        return [Piece(name)]
    stacks, number, half = match[1], int(match[2]), int(match[3] == "up")
    if match[3] == "down":
        return [Piece(f"{stacks}.output_linear", place=lambda stack: stack[number])]
    return [Piece(f"{stacks}.input_linear", place=lambda stack: half_of(stack[number], half))]


def half_of(weight: Tensor, half: int) -> Tensor:
    """Of its rows; there are files of 50,000 such, and Tensor.chunk would take seconds."""
    rows = len(weight) // 2
    return weight[half * rows : (half + 1) * rows]


def part_of_groups(groups: int, widths: list[int], index: int) -> Callable[[Tensor], Tensor]:
    """Of rows that lie in equal groups, each of parts of these widths, the parts `index`, side by side."""

    def take(weight: Tensor) -> Tensor:
        grouped = weight.reshape(groups, sum(widths), *weight.shape[1:])
        return torch.split(grouped, widths, dim=1)[index].flatten(0, 1)

    return take


def rows_of(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[rows]


FAMILY = Family(Qwen3Next, pieces, "model.embed_tokens.weight")
