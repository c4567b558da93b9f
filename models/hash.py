"""The hash model as a family: models/hash_definition.py with int64 state and page tensors in the real pools."""

import random
import time
from typing import Any

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.models.batch import Batch, Decode, Pools, Prefill, TensorSpec
from baton.models.config import ModelConfig, ModelError
from baton.models.hash_definition import FOLD_PERIOD, MODULUS, next_state

LOGIT = 10.0
MOST_DELAY = 3_600_000  # milliseconds


class HashModel:
    """A models.batch.Model without weights. Its hidden states are the output hashes, int64 [tokens, 1]."""

    def __init__(
        self,
        vocab_size: int,
        chunk_size: int,
        max_position: int,
        page_fold: bool = True,
        delay_ms: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.vocab_size = vocab_size
        self.chunk_size = chunk_size
        self.max_position = max_position
        self.page_fold = page_fold
        self.delay_ms = delay_ms

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "HashModel":
        """Build the model from config.json's vocab_size, chunk_size, max_position_embeddings, and optionally:

        page_fold: false for a model without pages, whose output depends on its state alone.
        delay_ms: [least, most], the range of the random time for which each forward sleeps.

        Raises ModelError for a missing or wrong value.
        """
        values = ModelConfig(config)
        return cls(
            vocab_size=values.integer("vocab_size"),
            chunk_size=values.integer("chunk_size"),
            max_position=values.integer("max_position_embeddings"),
            page_fold=values.flag("page_fold", default=True),
            delay_ms=_delay(config.get("delay_ms", (0, 0))),
        )

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((), torch.int64)]

    def kv_specs(self) -> list[TensorSpec]:
        return [TensorSpec((), torch.int64)] if self.page_fold else []

    def ring_specs(self) -> list[TensorSpec]:
        return [TensorSpec((), torch.int64)]

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        if self.delay_ms[1]:
            time.sleep(random.uniform(*self.delay_ms) / 1000)
        hashes: list[Tensor] = []
        fed = 0
        if batch.prefill is not None:
            fed = batch.prefill.offsets[-1]
            hashes += self._prefill(batch.tokens[:fed], batch.positions[:fed], batch.prefill, pools)
        if batch.decode is not None:
            hashes.append(self._decode(batch.tokens[fed:], batch.positions[fed:], batch.decode, pools))
        return torch.cat(hashes)[:, None]

    def replay(self, rows: Decode, pools: Pools) -> None:
        assert rows.drafts is not None
        self._decode_drafts(torch.empty(0, dtype=torch.int64), rows, rows.drafts, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        next_tokens = hidden % self.vocab_size
        return torch.zeros(len(hidden), self.vocab_size, device=hidden.device).scatter_(1, next_tokens, LOGIT)

    def _prefill(self, tokens: Tensor, positions: Tensor, prefill: Prefill, pools: Pools) -> list[Tensor]:
        """Return the output hashes of each segment. Update the states, the pages and the slots of the checkpoints."""
        slots = pools.state[0]
        hashes: list[Tensor] = []
        written: list[Tensor] = []
        for segment, (start, slot) in enumerate(zip(prefill.starts, prefill.slots, strict=True)):
            span = slice(prefill.offsets[segment], prefill.offsets[segment + 1])
            state = int(slots[slot])
            states: list[int] = []
            for token, position in zip(tokens[span].tolist(), positions[span].tolist(), strict=True):
                state = next_state(state, token, position)
                states.append(state)
            segment_states = torch.tensor(states, device=slots.device)
            slots[slot] = segment_states[-1]
            written.append(segment_states)
            folds: Tensor | int = 0
            if self.page_fold:
                folds = _write_and_fold(pools, prefill.page_table[segment], start, segment_states)
            hashes.append((segment_states * 31 + folds * 17 + 7) % MODULUS)
        for checkpoint in prefill.checkpoints:
            offset = checkpoint.position - prefill.starts[checkpoint.segment]
            slots[checkpoint.slot] = written[checkpoint.segment][offset - 1]
        return hashes

    def _decode(self, tokens: Tensor, positions: Tensor, decode: Decode, pools: Pools) -> Tensor:
        """Return the output hash of each token, and update the row's state and pages."""
        slots = pools.state[0]
        if decode.drafts is not None:
            return self._decode_drafts(tokens, decode, decode.drafts, pools)
        # next_state for all rows at once; int64 holds the sum because each term is below 2**48.
        states = (slots[decode.slots] * 48271 + (tokens + 1) * 69621 + (positions + 1) * 16807 + 1) % MODULUS
        slots[decode.slots] = states
        if not self.page_fold:
            return (states * 31 + 7) % MODULUS
        folds = [
            _write_and_fold(pools, decode.page_table[row], position, states[row : row + 1])
            for row, position in enumerate(decode.positions.tolist())
        ]
        return (states * 31 + torch.cat(folds) * 17 + 7) % MODULUS

    def _decode_drafts(self, tokens: Tensor, decode: Decode, drafts: Drafts, pools: Pools) -> Tensor:
        """Return the output hash of each token that rows with drafts feed. A ring holds the drafts themselves."""
        hashes, slots, [ring] = list[Tensor](), pools.state[0], pools.rings
        for row, (replayed, first, end, index) in enumerate(drafts.rows):
            slot, position = int(decode.slots[row]), int(decode.positions[row])
            state, fed = int(slots[slot]), tokens[first:end].tolist()
            for place, token in enumerate(ring[index, :replayed].tolist(), start=position - replayed):
                state = next_state(state, token, place)
            states = [state]
            for place, token in enumerate(fed, start=position):
                states.append(next_state(states[-1], token, place))
            slots[slot] = states[min(len(fed), 1)]
            ring[index, : max(len(fed) - 1, 0)] = tokens[first + 1 : end]
            written = torch.tensor(states[1:], dtype=torch.int64, device=slots.device)
            folds: Tensor | int = 0
            if self.page_fold and fed:
                folds = _write_and_fold(pools, decode.page_table[row], position, written)
            hashes.append((written * 31 + folds * 17 + 7) % MODULUS)
        return torch.cat(hashes)


def _delay(value: Any) -> tuple[float, float]:
    """Return delay_ms. Raises ModelError unless it is two numbers from 0 up."""
    match value:
        case [int() | float() as least, int() | float() as most] if 0 <= least <= most <= MOST_DELAY:
            return least, most
    raise ModelError(f"config.json: delay_ms should be two numbers from 0 to {MOST_DELAY}, not {value!r}")


def _write_and_fold(pools: Pools, page_row: Tensor, start: int, entries: Tensor) -> Tensor:
    """Store entries, int64 [n], at positions start, start + 1, …, and return the fold at each of them, int64 [n].

    The fold at a position is a weighted sum of the entries 0..position, see models/hash_definition.py:add_entry.
    Its terms are below 2**31, so the sum does not overflow int64.
    page_row: the row's page table, through which every entry from position 0 on is read. So a wrong page shows.
    """
    places = torch.arange(start + len(entries), device=entries.device)
    pages, offsets = page_row[places // pools.page_size].long(), places % pools.page_size
    pools.pages[0][pages[start:], offsets[start:]] = entries
    terms = pools.pages[0][pages, offsets] * (places % FOLD_PERIOD + 1) % MODULUS
    return terms.cumsum(0)[start:] % MODULUS
