"""Decoding rows as captured graphs, one for each size of a ladder: a replayed step costs the host only a few calls."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.actors.forward.device import Work
from baton.actors.forward.step.batching import PackedBatch, pack_batch
from baton.actors.forward.step.drawing import PackedDraws, draws_of, pack_draws, reported_tokens
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.actors.forward.streams import Stream
from baton.kernels.sampling import sample
from baton.models.batch import Model, Pools

Replay = Callable[[], None]
Variant = tuple[bool, bool]
VARIANTS: tuple[Variant, ...] = ((True, False), (False, False), (False, True))
"""(all_greedy, any_truncated) of SamplingTensors: each needs a graph of its own. All-greedy rows ignore truncation."""
INBOX_BYTES_A_ROW = 256  # more than a decoding row needs: the inbox must never be replaced, as graphs read from it


def ladder(most: int) -> list[int]:
    """Return the sizes to capture, up to `most`, close enough to each other that padding costs little."""
    steps = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most, 128)]
    return [*(size for size in steps if size < most), most]


class CapturedDecode:
    """The captured graphs of decoding steps, and the inbox that they read.

    A step's rows are padded with the table's padding row to the next size of the ladder. For each size, every array
    has the same address in the inbox at each upload, which the graphs rely on.
    """

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
        """Run and capture each size with padding rows, the largest first, because the others reuse its memory."""
        if only_largest:
            self._sizes = self._sizes[-1:]
        for size in reversed(self._sizes):
            self.send(Work(0, [], [self._table.padding] * size, [0] * size, []))
            self._models[size] = self._captured(partial(self._decode, size, self._batch))
            for all_greedy, any_truncated in VARIANTS:
                params = replace(self._packed_draws.params, all_greedy=all_greedy, any_truncated=any_truncated)
                draws = replace(self._packed_draws, params=params)
                self._draws[size, (all_greedy, any_truncated)] = self._captured(partial(self._draw, size, draws))

    def send(self, work: Work) -> None:
        """Upload the arrays that a step's decoding rows need, for the model and for the draw."""
        rows, padding = len(work.decodes), self._table.padding
        missing = self._size(rows) - rows
        padded = Work(work.step, [], [*work.decodes, *[padding] * missing], [*work.positions, *[0] * missing], [])
        self._inbox.begin()
        self._batch = pack_batch(self._inbox, padded, self._table, 1, self._pools.page_size, self._table.width)
        self._packed_draws = pack_draws(self._inbox, draws_of(padded), self._table, whole=True)
        self._inbox.send()
        self._rows = rows

    def logits(self) -> Tensor:
        """Replay the model for the rows that were sent.

        Return logits, float32 [rows, vocabulary], valid until the next step.
        """
        self._models[self._size(self._rows)]()
        return self._logits[: self._rows]

    def draw(self) -> Tensor:
        """Replay the draw from the result of `logits`, and keep the tokens on the device for the next step.

        Return int64 [rows]: the tokens, and -1 where the logits were not finite; valid until the next step.
        """
        params = self._packed_draws.params
        variant = (True, False) if params.greedy() else (False, params.truncated())
        self._draws[self._size(self._rows), variant]()
        return self._drawn[: self._rows]

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _captured(self, run: Replay) -> Replay:
        """Call `run` once, so that everything is compiled and allocated, then capture it."""
        run()
        return self._stream.capture(run)

    def _decode(self, size: int, packed: PackedBatch) -> None:
        batch = packed.complete(self._table)
        if batch.decode and packed.rows is not None:
            padding = packed.rows == self._table.padding
            batch = replace(batch, decode=replace(batch.decode, padding=padding))
        hidden = self._model.forward(batch, self._pools)
        self._logits[:size].copy_(self._model.logits(hidden))

    def _draw(self, size: int, packed: PackedDraws) -> None:
        sampled = sample(self._logits[:size], packed.params)
        self._table.last_token.index_copy_(0, packed.rows, sampled.tokens)
        self._drawn[:size].copy_(reported_tokens(sampled))
