"""Rows that decode, captured once for each size of a ladder and replayed: a step costs the host a few calls."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.actors.forward.device import Work
from baton.actors.forward.step.batching import PackedBatch, pack_batch
from baton.actors.forward.step.drawing import PackedDraws, draws_of, pack_draws, told_of
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.actors.forward.streams import Stream
from baton.kernels.sampling import sample
from baton.models.batch import Model, Pools

Replay = Callable[[], None]
Variant = tuple[bool, bool]
VARIANTS: tuple[Variant, ...] = ((True, False), (False, False), (False, True))
"""all_greedy and any_truncated of draws; what greedy rows have for top_k and top_p does not matter."""
INBOX_BYTES_A_ROW = 256


def ladder(most: int) -> list[int]:
    """Sizes up to `most`, close enough to each other that little is computed for nobody."""
    steps = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most, 128)]
    return [*(size for size in steps if size < most), most]


@dataclass(frozen=True, slots=True)
class PackedDecode:
    """A step's decoding rows, padded; it has the same place and size in every upload for so many."""

    batch: PackedBatch
    draws: PackedDraws


class CapturedDecode:
    """Decoding rows, padded to a size of the ladder by the table's row for that, in an inbox of their own."""

    def __init__(self, model: Model, pools: Pools, table: RowTable, stream: Stream) -> None:
        self._model, self._pools, self._table, self._stream = model, pools, table, stream
        device, most = pools.slots.device, table.padding
        self._sizes = ladder(most)
        self._inbox = Inbox(INBOX_BYTES_A_ROW * (most + 1), device, stream)
        self._logits = torch.empty(most, model.vocab_size, dtype=torch.float32, device=device)
        self._drawn = torch.empty(most, dtype=torch.int64, device=device)
        self._models: dict[int, Replay] = {}
        self._draws: dict[tuple[int, Variant], Replay] = {}

    def capture(self, only_largest: bool = False) -> None:
        """All sizes, the largest first: the others find their memory there. Runs each, with nothing but padding."""
        if only_largest:
            self._sizes = self._sizes[-1:]
        for size in reversed(self._sizes):
            self.send(Work(0, [], [self._table.padding] * size, [0] * size, []))
            packed = self._sent
            self._models[size] = self._captured(partial(self._decode, size, packed.batch))
            for variant in VARIANTS:
                draws = replace(packed.draws, all_greedy=variant[0], any_truncated=variant[1])
                self._draws[size, variant] = self._captured(partial(self._draw, size, draws))

    def send(self, work: Work) -> None:
        """Upload what the decoding rows of a step need, and what drawing for them does."""
        rows, padding = len(work.decodes), self._table.padding
        missing = self._size(rows) - rows
        padded = Work(work.step, [], [*work.decodes, *[padding] * missing], [*work.positions, *[0] * missing], [])
        packing = self._inbox.packing()
        packed = PackedDecode(
            pack_batch(packing, padded, self._table, 1, self._pools.page_size, self._table.width),
            pack_draws(packing, draws_of(padded), self._table, whole=True),
        )
        self._inbox.send(packing)
        self._sent, self._rows = packed, rows

    def logits(self) -> Tensor:
        """Decode what was sent: the logits, float32 [rows, V], which the next step writes over."""
        self._models[self._size(self._rows)]()
        return self._logits[: self._rows]

    def draw(self) -> Tensor:
        """Draw from these logits, and keep the tokens for the next step.

        int64 [rows], the tokens, -1 where the logits were not finite; the next step writes over it.
        """
        draws = self._sent.draws
        variant = (True, False) if draws.all_greedy else (False, draws.any_truncated)
        self._draws[self._size(self._rows), variant]()
        return self._drawn[: self._rows]

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _captured(self, run: Replay) -> Replay:
        run()
        return self._stream.capture(run)

    def _decode(self, size: int, packed: PackedBatch) -> None:
        batch = packed.unpack(self._inbox, self._table)
        if batch.decode and packed.rows:
            padding = self._inbox.view(packed.rows) == self._table.padding
            batch = replace(batch, decode=replace(batch.decode, padding=padding))
        hidden = self._model.forward(batch, self._pools)
        self._logits[:size].copy_(self._model.logits(hidden))

    def _draw(self, size: int, packed: PackedDraws) -> None:
        sampled = sample(self._logits[:size], packed.params(self._inbox))
        self._table.last_token.index_copy_(0, self._inbox.view(packed.rows), sampled.tokens)
        self._drawn[:size].copy_(told_of(sampled))
