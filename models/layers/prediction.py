"""A head for multi-token prediction (MTP): it predicts the tokens after the one that the model has drawn.

Source: DeepSeek-V3 (2024, arXiv:2412.19437), section 2.2, in the forms of Qwen3-Next, Qwen3.5 and Nemotron-H.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from baton.kernels.prediction import exchange_hidden, join
from baton.kernels.prefill.plan import PrefillPlan
from baton.models.batch import TensorSpec
from baton.models.layers.linear import Linear
from baton.models.layers.norm import RMSNorm
from baton.models.layers.step import BatchPlan

SEEN_FROM = 1
"""The first position with keys and values in the head's attention: there is no hidden state before token 0."""


class AttendingBlock(Protocol):
    """A block that begins with attention."""

    def __call__(self, residual: Tensor, x: Tensor | None, step: BatchPlan) -> tuple[Tensor, Tensor]:
        """Compute the block, see models/decoder.py:Decoder."""
        ...

    def observe(self, residual: Tensor, step: BatchPlan) -> None:
        """Write the keys and values of tokens whose output is not needed."""
        ...


class PredictionHead(nn.Module):
    """Blocks that estimate the hidden state after a token, from the token and the hidden state before it.

    The blocks' input is the projection of both, normed. The model's own head turns the result into logits. In the
    prediction of a further token, the result takes the place of the hidden state.

    Only the first block attends. Its keys and values at position p come from token p and the hidden state at p - 1, so
    they depend on no later token, and their pages are shared like those of other layers. Therefore the hidden state at
    the last token belongs to the state: it is the last tensor of a slot. The last ring holds the hidden states of
    drafts.

    size: of the hidden states. norms: those of the embedding, of the hidden state, and of the result.
    """

    def __init__(
        self,
        size: int,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
        blocks: Sequence[nn.Module],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = norms
        self.fc = Linear(2 * size, size, False, dtype)
        self.layers = nn.ModuleList(blocks)
        # A tuple hides the blocks from torch, which would otherwise register them again under a second name.
        self._blocks = cast(tuple[AttendingBlock, ...], tuple(blocks))

    def observe(self, embedded: Tensor, hidden: Tensor, step: BatchPlan) -> None:
        """Write the keys and values of a step's tokens, and keep the hidden state of each row's last token.

        embedded: [tokens, size], the tokens' embeddings. hidden: [tokens, size], the model's hidden states.
        """
        self._blocks[0].observe(self._joined(embedded, exchange(hidden, step)), step)

    def predict(self, embedded: Tensor, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return estimates of the hidden states after some tokens, [rows, size]; write these tokens' keys and values.

        embedded: [rows, size], the tokens' embeddings. hidden: [rows, size], the hidden states before the tokens.
        step: rows that decode these tokens.
        """
        residual, x = self._joined(embedded, hidden), None
        for block in self._blocks:
            residual, x = block(residual, x, step)
        predicted: Tensor = self.norm(residual, x)[1]
        return predicted

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        both = join(self.embedding_norm(embedded, None)[1], self.hidden_norm(hidden, None)[1])
        joined: Tensor = self.fc(both)
        return joined


def hidden_spec(size: int, dtype: torch.dtype) -> TensorSpec:
    """Return what the head adds to a slot, and to a ring for each draft."""
    return TensorSpec((size,), dtype)


def exchange(hidden: Tensor, step: BatchPlan) -> Tensor:
    """Return the hidden state before each of a step's tokens, like `hidden`; before position 0 it is 0.

    Store the hidden states of each row's last token and drafts, and of checkpoints.

    hidden: [tokens, size], the hidden states of the tokens.
    """
    states, before = step.pools.state[-1], list[Tensor]()
    if step.prefill:
        before.append(_exchange_prompts(hidden[: step.prefilled], states, step.prefill))
    if rows := step.decode:
        before.append(exchange_hidden(hidden[step.prefilled :], states, rows.slots, rows.drafts, _ring(step)))
    return before[0] if len(before) == 1 else torch.cat(before)


def _exchange_prompts(hidden: Tensor, states: Tensor, prefill: PrefillPlan) -> Tensor:
    """Do what `exchange` does, for the segments of prompts."""
    before, slots = torch.cat([hidden[:1], hidden[:-1]]), list(prefill.slots)
    before[prefill.offsets[:-1]] = states[slots]
    states[slots] = hidden[[end - 1 for end in prefill.offsets[1:]]]
    for segment, position, slot in prefill.checkpoints:
        states[slot] = hidden[prefill.offsets[segment] + position - prefill.starts[segment] - 1]
    return before


def replay(step: BatchPlan) -> None:
    """Store the hidden state of the last accepted draft in the states of decoding rows that feed nothing."""
    rows, states = step.decode, step.pools.state[-1]
    if rows is None or rows.drafts is None:
        raise ValueError("there are no accepted drafts")
    exchange_hidden(states[:0], states, rows.slots, rows.drafts, _ring(step))


def _ring(step: BatchPlan) -> Tensor | None:
    """Return the ring for hidden states; None if there are no drafts."""
    return step.pools.rings[-1] if step.decode and step.decode.drafts else None
