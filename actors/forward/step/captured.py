"""Decoding rows as captured graphs, one for each size of a ladder: a replayed step costs the host only a few calls."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.actors.forward.device import Work, WorkDraft
from baton.actors.forward.step.batching import PackedBatch, pack_batch
from baton.actors.forward.step.drawing import PackedDraws, draws_of, pack_draws, reported_tokens
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.padded import pack_padded
from baton.actors.forward.step.rows import RowTable
from baton.actors.forward.streams import Stream
from baton.kernels.sampling import sample
from baton.models.batch import Model, Pools

Replay = Callable[[], None]
Variant = tuple[bool, bool]
VARIANTS: tuple[Variant, ...] = ((True, False), (False, False), (False, True))
"""(all_greedy, any_truncated) of SamplingTensors: each needs a graph of its own. All-greedy rows ignore truncation."""
Shape = tuple[int, bool]
"""The number of tokens that a captured step feeds, and whether its rows have drafts; without them, one token a row."""
MOST_DRAFTING = 128
"""Most tokens that rows with drafts feed in a captured step. With more, drafts are hardly worth their cost."""
INBOX_BYTES_A_ROW = 256  # more than a decoding row needs: the inbox must never be replaced, as graphs read from it


def ladder(most: int) -> list[int]:
    """Return the sizes to capture, up to `most`, close enough to each other that padding costs little."""
    steps = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most, 128)]
    return [*(size for size in steps if size < most), most]


def ladder_of_drafts(rows: int, drafts: int) -> list[int]:
    """Return the numbers of tokens to capture for rows of which each may feed `drafts` drafts; [] without drafts."""
    most = min(rows * (1 + drafts), MOST_DRAFTING)
    steps = [*range(2, 10), 12, 16, *range(24, 64, 8), *range(64, MOST_DRAFTING, 32)]
    return [*(size for size in steps if size < most), most] if drafts else []


def fed_tokens(work: Work) -> int:
    """Return how many tokens the rows that decode feed."""
    return len(work.decodes) + sum(len(draft.tokens) for draft in work.drafts)


class CapturedDecode:
    """The captured graphs of decoding steps, and the inbox that they read.

    A step's rows are padded with the table's padding row to the next size of the ladder. For each size, every array
    has the same address in the inbox at each upload, which the graphs rely on. Rows with drafts have a ladder of their
    own, by the number of tokens that they feed (padded.py).
    """

    def __init__(self, model: Model, pools: Pools, table: RowTable, stream: Stream) -> None:
        self._model, self._pools, self._table, self._stream = model, pools, table, stream
        device, rows = pools.slots.device, table.padding
        self._most_drafts = pools.rings[0].shape[1] if pools.rings else 0
        self._sizes, self._draft_sizes = ladder(rows), ladder_of_drafts(rows, self._most_drafts)
        most = max([rows, *self._draft_sizes])
        self._inbox = Inbox(INBOX_BYTES_A_ROW * (most + 1), device, stream)
        self._logits = torch.empty(most, model.vocab_size, dtype=torch.float32, device=device)
        self._drawn = torch.empty(most, dtype=torch.int64, device=device)
        self._models: dict[Shape, Replay] = {}
        self._draws: dict[tuple[Shape, Variant], Replay] = {}

    def capture(self, only_largest: bool = False) -> None:
        """Run and capture each size with padding rows, the largest first, because the others reuse its memory."""
        if only_largest:
            self._sizes, self._draft_sizes = self._sizes[-1:], self._draft_sizes[-1:]
        padding = self._table.padding
        for size in reversed(self._sizes):
            self.send(Work(0, [], [padding] * size, [0] * size, []))
            self._capture(size)
        for size in reversed(self._draft_sizes):
            self.send(Work(0, [], [padding] * size, [0] * size, [], drafts=[WorkDraft(padding, 0, ())]))
            self._capture(size)

    def takes(self, work: Work) -> bool:
        """Return whether a step of this size is captured."""
        return not work.drafts or (bool(self._draft_sizes) and fed_tokens(work) <= self._draft_sizes[-1])

    def send(self, work: Work) -> None:
        """Upload the arrays that a step's decoding rows need, for the model and for the draw."""
        fed, page_size = fed_tokens(work), self._pools.page_size
        sizes = self._draft_sizes if work.drafts else self._sizes
        size = sizes[bisect_left(sizes, fed)]
        self._inbox.begin()
        if work.drafts:
            of_rows = work, self._table, page_size, size, self._most_drafts
            self._batch, self._packed_draws = pack_padded(self._inbox, *of_rows)
        else:
            missing, padding = size - fed, self._table.padding
            padded = Work(work.step, [], [*work.decodes, *[padding] * missing], [*work.positions, *[0] * missing], [])
            self._batch = pack_batch(self._inbox, padded, self._table, 1, page_size, self._table.width)
            self._packed_draws = pack_draws(self._inbox, draws_of(padded), self._table, whole=True)
        self._inbox.send()
        self._fed, self._shape = fed, (size, bool(work.drafts))

    def logits(self) -> Tensor:
        """Replay the model for the rows that were sent.

        Return logits, float32 [fed tokens, vocabulary], valid until the next step.
        """
        self._models[self._shape]()
        return self._logits[: self._fed]

    def draw(self) -> Tensor:
        """Replay the draw from the result of `logits`, and keep the tokens on the device for the next step.

        Return int64 [fed tokens]: the tokens, and -1 where the logits were not finite; valid until the next step.
        """
        params = self._packed_draws.params
        variant = (True, False) if params.greedy() else (False, params.truncated())
        self._draws[self._shape, variant]()
        return self._drawn[: self._fed]

    def _capture(self, size: int) -> None:
        """Capture the step that was sent, which feeds `size` tokens."""
        self._models[self._shape] = self._captured(partial(self._decode, size, self._batch))
        for all_greedy, any_truncated in VARIANTS:
            params = replace(self._packed_draws.params, all_greedy=all_greedy, any_truncated=any_truncated)
            draws = replace(self._packed_draws, params=params)
            self._draws[self._shape, (all_greedy, any_truncated)] = self._captured(partial(self._draw, size, draws))

    def _captured(self, run: Replay) -> Replay:
        """Call `run` once, so that everything is compiled and allocated, then capture it."""
        run()
        return self._stream.capture(run)

    def _decode(self, size: int, packed: PackedBatch) -> None:
        batch = packed.complete(self._table)
        if batch.decode and packed.rows is not None:
            of_tokens = packed.rows if packed.drafts is None else packed.drafts.rows
            padding = of_tokens == self._table.padding
            batch = replace(batch, decode=replace(batch.decode, padding=padding))
        hidden = self._model.forward(batch, self._pools)
        self._logits[:size].copy_(self._model.logits(hidden))

    def _draw(self, size: int, packed: PackedDraws) -> None:
        sampled = sample(self._logits[:size], packed.params)
        self._table.last_token.index_copy_(0, packed.rows, sampled.tokens)  # with drafts, replaced after verification
        self._drawn[:size].copy_(reported_tokens(sampled))
