"""A language model of blocks: what its family says of it, and how a step goes through it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.models.batch import Batch, Pools, TensorSpec
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.rope import Rotation
from baton.models.layers.step import BatchPlan, plan_batch


@dataclass(frozen=True)
class Outline:
    """What a model is besides its layers.

    kernel: the width of its convolutions. states, pages: what all layers keep in a slot, and of a position.
    rotate: of positions, where they are encoded. residual_dtype: None for that of the embeddings.
    multipliers: of the embeddings, of what the last block gives, and of the logits.
    """

    vocab_size: int
    max_position: int
    chunk_size: int
    kernel: int
    states: list[TensorSpec]
    pages: list[TensorSpec]
    rotate: Callable[[Tensor], Rotation] | None = None
    residual_dtype: torch.dtype | None = None
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Decoder(nn.Module):
    """Embeddings, blocks, a norm, and a head, if that is not the embeddings.

    body: what checkpoints call all but the head; parts: what they call the embeddings, the blocks and the norm.
    A block takes (residual, x, step) and returns the first two: x, the output of the block before, is not yet added to
    the residual; nor is what is returned with it. It is None for the first.
    """

    def __init__(
        self,
        outline: Outline,
        embeddings: Embedding,
        blocks: Sequence[nn.Module],
        norm: RMSNorm,
        head: Linear | None,
        body: str = "model",
        parts: tuple[str, str, str] = ("embed_tokens", "layers", "norm"),
    ) -> None:
        super().__init__()
        self.outline = outline
        self.vocab_size, self.max_position = outline.vocab_size, outline.max_position
        self.chunk_size = outline.chunk_size
        named = nn.Module()
        for name, part in zip(parts, (embeddings, nn.ModuleList(blocks), norm), strict=True):
            named.add_module(name, part)
        self.add_module(body, named)
        self.lm_head = head
        # In tuples no part is registered by a second name.
        self._embeddings, self._blocks, self._norm = (embeddings,), tuple(blocks), (norm,)

    def state_specs(self) -> list[TensorSpec]:
        return self.outline.states

    def kv_specs(self) -> list[TensorSpec]:
        return self.outline.pages

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.run(self.embed(batch.tokens), self.plan(batch, pools))

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        return plan_batch(batch, pools, self.chunk_size, self.outline.kernel, self.outline.rotate)

    def embed(self, tokens: Tensor) -> Tensor:
        [embeddings], multiplier = self._embeddings, self.outline.multipliers[0]
        embedded: Tensor = embeddings(tokens)
        embedded = embedded if multiplier == 1 else embedded * multiplier
        return embedded.to(self.outline.residual_dtype or embedded.dtype)

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        x: Tensor | None = None
        for block in self._blocks:
            residual, x = block(residual, x, step)
        [norm], multiplier = self._norm, self.outline.multipliers[1]
        hidden: Tensor = norm(residual, x, multiplier)[1]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        [embeddings], multiplier = self._embeddings, self.outline.multipliers[2]
        logits = self.lm_head(hidden) if self.lm_head is not None else embeddings.logits(hidden)
        return logits.float() if multiplier == 1 else logits.float() * multiplier


class MixerBlock(nn.Module):
    """A norm, then a mixer or an MLP; by the names that checkpoints have for them, in this order."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        add_parts(self, parts)
        self._parts = tuple(parts.values())

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        norm, mixer = self._parts
        residual, normed = norm(residual, x)
        return residual, mixer(normed, step)


class Block(nn.Module):
    """A norm, a mixer, a norm, and an MLP or a mixture of experts; by the names that checkpoints have for them."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        add_parts(self, parts)
        self._parts = tuple(parts.values())

    def forward(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        mixer_norm, mixer, mlp_norm, mlp = self._parts
        residual, normed = mixer_norm(residual, x)
        residual, normed = mlp_norm(residual, mixer(normed, step))
        return residual, mlp(normed, step)


def add_parts(module: nn.Module, parts: dict[str, nn.Module]) -> None:
    for name, part in parts.items():
        module.add_module(name, part)


def numbered(kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each layer's kind, and its number among the layers of that kind."""
    seen = Counter[str]()
    for kind in kinds:
        yield kind, seen[kind]
        seen[kind] += 1
