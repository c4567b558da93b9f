"""Granite 4 hybrid, dense or with experts (transformers' GraniteMoeHybridForCausalLM)."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.kernels.moe.shared_expert import add_shared
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import RENAMED_KINDS, Decoder, Outline, checked_kinds, numbered
from baton.models.family import Family, Piece, expert_pieces
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.experts import Experts, SoftmaxRouter
from baton.models.layers.mamba2 import Mamba2Mixer, Mamba2Settings
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Rotation, read_rotation
from baton.models.layers.step import BatchPlan

EPS = 1e-6
EXPERTS = {
    "input_linear.weight": "experts.input_linear",
    "output_linear.weight": "experts.output_linear",
    "router.layer.weight": "router.weight",
}
"""The checkpoint's names of the weights of a layer's experts → the parameters that these weights fill."""
EXPERT = re.compile(r"(.*\.block_sparse_moe\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
"""Names of expert weights in checkpoints of llm-compressor, which stores each expert's weights separately."""


class BlockSparseMoE(nn.Module):
    """A mixture of routed experts, weighted by the softmax of the chosen experts' logits."""

    def __init__(self, config: ModelConfig, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, top_k = config.integer("hidden_size"), config.integer("num_experts_per_tok", default=2)
        self.router = SoftmaxRouter(hidden, count, top_k, True, dtype, softmax_first=False)
        self.experts = Experts(hidden, config.integer("intermediate_size"), count, "silu_gated", dtype)

    def forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        """Return the output [tokens, hidden] for x [tokens, hidden]."""
        output: Tensor = self.experts(x, *self.router(x, step.padding))
        return output


class GraniteBlock(nn.Module):
    """A block of a mixer (`mamba` or `self_attn`), then an MLP, experts, or both.

    Each of the two outputs is multiplied by residual_multiplier before it is added to the residual.
    """

    def __init__(self, config: ModelConfig, name: str, mixer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=EPS)
        self.multiplier = read_residual_multiplier(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.add_module(name, mixer)
        self._mixer = (mixer,)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        experts, intermediate = read_experts(config), read_shared_size(config)
        self.block_sparse_moe = BlockSparseMoE(config, experts, dtype) if experts else None
        self.shared_mlp = GatedMLP(hidden, intermediate, dtype) if intermediate else None

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """Return the new residual, and an output that is yet to be added to it: see models/decoder.py:Decoder."""
        residual, normed = self.input_layernorm(residual, x, self.multiplier)
        [mixer] = self._mixer
        residual, normed = self.post_attention_layernorm(residual, mixer(normed, step), self.multiplier)
        return residual, self._feed_forward(normed, step)

    def _feed_forward(self, x: Tensor, step: BatchPlan) -> Tensor:
        shared: Tensor | None = self.shared_mlp(x) if self.shared_mlp else None
        if self.block_sparse_moe is None:
            assert shared is not None
            return shared
        routed: Tensor = self.block_sparse_moe(x, step)
        return routed if shared is None else add_shared(routed, shared)


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    refuse_unsupported(config)
    kinds = read_layers(config)
    mamba = Mamba2Settings.from_config(config, state_dtype, eps=EPS)
    attention = AttentionSettings.from_config(config, scale=config.number("attention_multiplier", default=1.0))
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=2048),
        chunk_size=config.integer("mamba_chunk_size", default=256),
        kernel=mamba.kernel,
        states=mamba.state_specs() * kinds.count("mamba"),
        rings=[mamba.ring_spec(dtype)] * kinds.count("mamba"),
        pages=attention.kv_specs(dtype) * kinds.count("attention"),
        rotate=read_positions(config, attention.head_dim),
        multipliers=(
            config.number("embedding_multiplier", default=1.0),
            read_residual_multiplier(config),
            1 / config.number("logits_scaling", default=1.0),
        ),
    )

    def block(kind: str, index: int) -> GraniteBlock:
        is_mamba = kind == "mamba"
        mixer = Mamba2Mixer(mamba, index, dtype) if is_mamba else Attention(attention, index, dtype)
        return GraniteBlock(config, "mamba" if is_mamba else "self_attn", mixer, dtype)

    blocks, norm = [block(kind, index) for kind, index in numbered(kinds)], RMSNorm(mamba.hidden, mamba.eps, dtype)
    return Decoder(config, outline, blocks, norm, dtype)


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise ModelError for options that are not supported."""
    if not read_experts(config) and not read_shared_size(config):
        raise ModelError(
            "config.json: num_local_experts = 0 and shared_intermediate_size = 0 leave layers without MLPs"
        )
    config.require("hidden_act", "silu", "swish")
    config.require("position_embedding_type", "rope", "nope")


def read_experts(config: ModelConfig) -> int:
    """Return the number of experts per layer; 0 if there are none."""
    return config.integer("num_local_experts", default=8, least=0)


def read_shared_size(config: ModelConfig) -> int:
    """Return the inner size of the MLP that all tokens share; 0 if there is none."""
    return config.integer("shared_intermediate_size", default=1024, least=0)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer: mamba or attention."""
    names = config.strings("layer_types", "layers_block_type") or ["mamba"] * config.integer("num_hidden_layers")
    return checked_kinds([RENAMED_KINDS.get(name, name) for name in names], "mamba", "attention")


def read_residual_multiplier(config: ModelConfig) -> float:
    return config.number("residual_multiplier", default=1.0)


def read_positions(config: ModelConfig, head_dim: int) -> list[Callable[[Tensor], Rotation]]:
    """Return the functions that compute the rotations for positions; [] if the model does not encode positions."""
    return [read_rotation(config, head_dim).of] if config.values.get("position_embedding_type") == "rope" else []


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills; [] for a shared MLP of size 0, which files may hold."""
    if ".shared_mlp." in name and not read_shared_size(config):
        return []
    if match := EXPERT.fullmatch(name):
        return expert_pieces(match[1], int(match[2]), match[3])
    path, found, projection = name.partition(".block_sparse_moe.")
    return [Piece(path + found + EXPERTS.get(projection, projection))]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
