"""The decoder that all families but `hash` build: embeddings, blocks, a norm and a head."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from baton.kernels.attention.latents.sizes import Forms
from baton.kernels.sampling import widen
from baton.models.batch import Batch, Decode, Pools, TensorSpec
from baton.models.config import ModelConfig, ModelError
from baton.models.layers import prediction
from baton.models.layers.attention import Attention
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.prediction import PredictionHead
from baton.models.layers.rope import Rotation
from baton.models.layers.step import BatchPlan, Mixer, plan_batch

RENAMED_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of layers of hybrid Mamba-2 models: name in newer versions of transformers → older name, which is used here."""


@dataclass(frozen=True)
class Outline:
    """The properties of a model as a whole, which its blocks do not hold."""

    max_position: int
    chunk_size: int  # prompts are computed in chunks of this many tokens
    kernel: int  # the width of the convolutions
    states: list[TensorSpec]  # state tensors of all layers in a slot
    rings: list[TensorSpec]  # what rings hold of a draft, by recurrent layer
    pages: list[TensorSpec]  # page tensors of all layers, per position
    rotate: Sequence[Callable[[Tensor], Rotation]] = ()  # return the rotations for positions; empty: no encoding
    forms: Forms | None = None  # limits of latent attention; None: the model has none
    residual_dtype: torch.dtype | None = None  # dtype of the residual stream; None: the embeddings' dtype
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)  # factors: embeddings, last block's output, logits


class Decoder(nn.Module):
    """Embeddings, blocks, a norm, and a head unless the embeddings are tied to it.

    A block takes (residual, x, step) and returns the next (residual, x). x is the output of the previous block, before
    it is added to the residual; it is None for the first block. A block's first norm adds x to the residual, so that
    adding, multiplying and normalising are one operation.

    config: the source of vocab_size, hidden_size and tie_word_embeddings.
    body: the checkpoint's name of the module that contains everything except the head.
    parts: the checkpoint's names of the embeddings, the blocks and the norm.
    head: predicts further tokens; None: the model has no such head, or it was not loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        outline: Outline,
        blocks: Sequence[nn.Module],
        norm: RMSNorm,
        dtype: torch.dtype,
        body: str = "model",
        parts: tuple[str, str, str] = ("embed_tokens", "layers", "norm"),
        head: PredictionHead | None = None,
    ) -> None:
        super().__init__()
        self.outline = outline
        self.vocab_size, self.max_position = config.integer("vocab_size"), outline.max_position
        self.chunk_size = outline.chunk_size
        hidden, tied = config.integer("hidden_size"), config.flag("tie_word_embeddings", default=False)
        embeddings = Embedding(self.vocab_size, hidden, tied, dtype)
        named = nn.Module()
        for name, part in zip(parts, (embeddings, nn.ModuleList(blocks), norm), strict=True):
            named.add_module(name, part)
        self.add_module(body, named)
        self.lm_head = None if tied else Linear(hidden, self.vocab_size, False, dtype)
        self.mtp = head
        self._hidden = [prediction.hidden_spec(hidden, dtype)] if head else []
        # Tuples hide the modules from torch, which would otherwise register them again under a second name.
        self._embeddings, self._blocks, self._norm = (embeddings,), tuple(blocks), (norm,)

    @property
    def predicts(self) -> bool:
        return self.mtp is not None

    def state_specs(self) -> list[TensorSpec]:
        return self.outline.states + self._hidden

    def kv_specs(self) -> list[TensorSpec]:
        return self.outline.pages

    def ring_specs(self) -> list[TensorSpec]:
        return self.outline.rings + self._hidden

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.run(self.embed(batch.tokens), self.plan(batch, pools))

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        """Return what all layers need to know about the batch."""
        outline = self.outline
        return plan_batch(batch, pools, self.chunk_size, outline.kernel, outline.rotate, outline.forms)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, [tokens, hidden], in the dtype of the residual stream."""
        [embeddings], multiplier = self._embeddings, self.outline.multipliers[0]
        embedded: Tensor = embeddings(tokens)
        embedded = embedded if multiplier == 1 else embedded * multiplier
        return embedded.to(self.outline.residual_dtype or embedded.dtype)

    def run(self, embedded: Tensor, step: BatchPlan) -> Tensor:
        """Return the hidden states after the blocks and the norm, [tokens, hidden]; update states and pages."""
        residual = embedded
        x: Tensor | None = None
        for block in self._blocks:
            residual, x = block(residual, x, step)
        [norm], multiplier = self._norm, self.outline.multipliers[1]
        hidden: Tensor = norm(residual, x, multiplier)[1]
        if self.mtp:
            self.mtp.observe(embedded, hidden, step)
        return hidden

    def replay(self, rows: Decode, pools: Pools) -> None:
        """Advance the states of rows that feed nothing: replay their accepted drafts. rows: must have `drafts`."""
        step = BatchPlan(pools, 0, None, rows, None)
        for part in chain.from_iterable(block.modules() for block in self._blocks):
            if isinstance(part, Mixer):
                part.replay(step)
        if self.mtp:
            prediction.replay(step)

    def predict(self, tokens: Tensor, hidden: Tensor, rows: Decode, pools: Pools) -> Tensor:
        step = self.plan(Batch(tokens, rows.positions, None, rows), pools)
        return self.estimate(self.embed(tokens), hidden, step)

    def estimate(self, embedded: Tensor, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return the estimates of `predict`. embedded: the tokens' embeddings, [rows, hidden]."""
        assert self.mtp is not None
        return self.mtp.predict(embedded, hidden, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab]."""
        [embeddings], multiplier = self._embeddings, self.outline.multipliers[2]
        logits = self.lm_head(hidden) if self.lm_head is not None else embeddings.logits(hidden)
        return widen(logits, multiplier)


class MixerBlock(nn.Module):
    """A block of a norm and a mixer or MLP.

    parts: the two modules in this order. The argument names are the checkpoint's names of the modules.
    """

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        add_parts(self, parts)
        self._parts = tuple(parts.values())

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        norm, mixer = self._parts
        residual, normed = norm(residual, x)
        return residual, mixer(normed, step)

    def observe(self, residual: Tensor, step: BatchPlan) -> None:
        """Write the keys and values of tokens whose output is not needed. The mixer must be attention."""
        observe(residual, step, *self._parts)


class Block(nn.Module):
    """A block of a norm, a mixer, a norm, and an MLP or mixture of experts.

    parts: the four modules in this order. The argument names are the checkpoint's names of the modules.
    """

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        add_parts(self, parts)
        self._parts = tuple(parts.values())

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        mixer_norm, mixer, mlp_norm, mlp = self._parts
        residual, normed = mixer_norm(residual, x)
        residual, normed = mlp_norm(residual, mixer(normed, step))
        return residual, mlp(normed, step)

    def observe(self, residual: Tensor, step: BatchPlan) -> None:
        """Write the keys and values of tokens whose output is not needed. The mixer must be attention."""
        observe(residual, step, *self._parts[:2])


class SandwichBlock(nn.Module):
    """A block like Block, with a norm after the mixer and a norm after the MLP.

    parts: norm, mixer, norm, norm, MLP, norm. The argument names are the checkpoint's names of the modules.
    """

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        add_parts(self, parts)
        self._parts = tuple(parts.values())

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        mixer_norm, mixer, mixed_norm, mlp_norm, mlp, mlp_output_norm = self._parts
        residual, normed = mixer_norm(residual, x)
        residual, normed = mlp_norm(residual, mixed_norm(mixer(normed, step), None)[1])
        return residual, mlp_output_norm(mlp(normed, step), None)[1]


def observe(residual: Tensor, step: BatchPlan, norm: nn.Module, mixer: nn.Module) -> None:
    """Write the keys and values of tokens whose output is not needed. norm: of the mixer's input."""
    if not isinstance(mixer, Attention):
        raise TypeError(f"{type(mixer).__name__} has no keys and values")
    mixer.write(norm(residual, None)[1], step)


def add_parts(module: nn.Module, parts: dict[str, nn.Module]) -> None:
    for name, part in parts.items():
        module.add_module(name, part)


def numbered(kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each layer's kind, and its index among the layers of that kind."""
    seen = Counter[str]()
    for kind in kinds:
        yield kind, seen[kind]
        seen[kind] += 1


def checked_kinds(kinds: list[str], *known: str) -> list[str]:
    """Return `kinds`, the kind of each layer. Raises ModelError if there are no layers, or for an unknown kind."""
    if not kinds:
        raise ModelError("config.json: there are no layers")
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ModelError(f"config.json: unknown layers {', '.join(unknown)} (supported: {', '.join(known)})")
    return kinds
