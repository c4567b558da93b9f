"""OLMo Hybrid (transformers' OlmoHybridForCausalLM): gated delta nets, and attention blocks that norm their outputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Block, Decoder, Outline, checked_kinds, numbered
from baton.models.family import Family, Piece, gated_mlp, rows_of
from baton.models.layers.attention import Attention, AttentionSettings
from baton.models.layers.delta import DeltaMixer, DeltaSettings
from baton.models.layers.linear import rows_by_name
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Rotation, read_rotation
from baton.models.layers.step import BatchPlan

CHUNK = 64  # tokens of a chunk in prefill kernels; config.json does not name a size
KINDS = ("linear_attention", "full_attention")
GATE_EPS = 1e-5
"""The epsilon of the norm before the output gate of a delta net. It does not depend on the model's rms_norm_eps."""
PROJECTED = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}
CONVOLVED = {"q_conv1d": "q", "k_conv1d": "k", "v_conv1d": "v"}
DELTA = {"o_norm": "norm", "o_proj": "out_proj"}
NORMS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
"""The checkpoint's names of the norms of a block with a delta net → the names here."""


class ReorderedBlock(nn.Module):
    """A block of attention and an MLP. The output of each is normed before it is added to the residual stream."""

    def __init__(self, hidden: int, eps: float, attention: Attention, mlp: GatedMLP, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, dtype)

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """Return the new residual, and an output that is yet to be added to it: see models/decoder.py:Decoder."""
        residual = self._sum(residual, x)
        attended = self.post_attention_layernorm(self.self_attn(residual, step), None)[1]
        residual = self._sum(residual, attended)
        return residual, self.post_feedforward_layernorm(self.mlp(residual), None)[1]

    def _sum(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Return residual + x. RMSNorm adds them; its norm is not used, because this block does not norm its inputs."""
        total: Tensor = residual if x is None else self.post_attention_layernorm(residual, x)[0]
        return total


def build(config: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> Decoder:
    config.require("hidden_act", "silu", "swish")
    kinds, delta, attention = read_layers(config), read_delta(config, state_dtype), read_attention(config)
    eps = read_eps(config)
    outline = Outline(
        max_position=config.integer("max_position_embeddings", default=65536),
        chunk_size=CHUNK,
        kernel=delta.kernel,
        states=delta.state_specs() * kinds.count("linear_attention"),
        rings=[delta.ring_spec(dtype)] * kinds.count("linear_attention"),
        pages=attention.kv_specs(dtype) * kinds.count("full_attention"),
        rotate=read_rotate(config, attention.head_dim),
    )

    def norm() -> RMSNorm:
        return RMSNorm(delta.hidden, eps, dtype)

    def block(kind: str, index: int) -> nn.Module:
        mlp = GatedMLP(delta.hidden, config.integer("intermediate_size"), dtype)
        if kind == "full_attention":
            return ReorderedBlock(delta.hidden, eps, Attention(attention, index, dtype), mlp, dtype)
        mixer = DeltaMixer(delta, index, dtype)
        return Block(input_layernorm=norm(), linear_attn=mixer, post_attention_layernorm=norm(), mlp=mlp)

    return Decoder(config, outline, [block(*kind) for kind in numbered(kinds)], norm(), dtype)


def read_layers(config: ModelConfig) -> list[str]:
    """Return the kind of each layer. By default every fourth has attention; of up to three, the last."""
    kinds = config.strings("layer_types")
    if kinds is None:
        layers = config.integer("num_hidden_layers")
        attending = range(3, layers, 4) or [layers - 1]
        kinds = [KINDS[layer in attending] for layer in range(layers)]
    return checked_kinds(kinds, *KINDS)


def read_eps(config: ModelConfig) -> float:
    return config.number("rms_norm_eps", default=1e-6)


def read_delta(config: ModelConfig, state_dtype: torch.dtype) -> DeltaSettings:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    key_heads = config.integer("linear_num_key_heads", default=heads)
    width = config.integer("linear_key_head_dim", default=3 * hidden // (4 * key_heads))
    return DeltaSettings(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=config.integer("linear_num_value_heads", default=heads),
        key_width=width,
        value_width=config.integer("linear_value_head_dim", default=2 * width),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        eps=GATE_EPS,
        state_dtype=state_dtype,
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


def read_attention(config: ModelConfig) -> AttentionSettings:
    return AttentionSettings.from_config(config, norm_eps=read_eps(config), norm_offset=0.0, norm_together=True)


def read_rotate(config: ModelConfig, head_dim: int) -> list[Callable[[Tensor], Rotation]]:
    """Return the rotations of queries and keys. If rope_theta is null there are none: positions are not encoded.

    Raises ModelError if the key is missing, because versions of transformers differ in what that means.
    """
    nested = config.values.get("rope_parameters")
    values = nested if isinstance(nested, dict) else config.values
    if "rope_theta" not in values:
        raise ModelError("config.json lacks rope_theta: a number, or null if positions are not encoded")
    return [] if values["rope_theta"] is None else [read_rotation(config, head_dim).of]


def pieces(name: str, config: ModelConfig) -> list[Piece]:
    """Return which parameters the stored tensor `name` fills.

    The projections of a delta net are joined into one parameter, and so are its convolutions.
    """
    path, _, leaf = name.rpartition(".")
    owner, _, part = path.rpartition(".")
    if owner.endswith(".linear_attn"):
        return delta_pieces(owner, part, leaf, read_delta(config, torch.float32))
    if part in NORMS:
        return [Piece(f"{owner}.{NORMS[part]}.{leaf}")]
    return gated_mlp(name) or [Piece(name)]


def delta_pieces(owner: str, part: str, leaf: str, s: DeltaSettings) -> list[Piece]:
    if part in PROJECTED:
        return [Piece(f"{owner}.in_proj.{leaf}", place=rows_of(s.rows[PROJECTED[part]]))]
    if part in CONVOLVED:
        channels = rows_by_name({"q": s.keys, "k": s.keys, "v": s.inner})
        return [Piece(f"{owner}.conv1d.{leaf}", place=rows_of(channels[CONVOLVED[part]]))]
    return [Piece(f"{owner}.{DELTA.get(part, part)}.{leaf}")]


FAMILY = Family(build, pieces, "model.embed_tokens.weight")
