"""Tokens that the model's own head predicts after a step (multi-token prediction), for rows that have just drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.actors.forward.device import Work
from baton.actors.forward.step.drawing import Draws
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.models.batch import Decode, Pools, PredictingModel


@dataclass(frozen=True, slots=True)
class PackedPredictions:
    """The n rows for which tokens are predicted after a step, those with the most tokens first."""

    counts: list[int]  # how many tokens to predict for each row
    indices: list[int]  # the rows
    rows: Tensor  # int64 [n]: the same on the device
    drawing: Tensor  # int64 [n]: the index of each row among the step's rows that draw
    draws: Tensor  # int64 [rows that draw]: the index of each row's last draw, if none of its drafts is rejected
    at: Tensor  # int64 [draws]: index in the batch of the token before the drawn one
    positions: Tensor  # int64 [draws]: the position of the drawn token
    width: int  # entries of a row's page table that are needed

    def predict(
        self, model: PredictingModel, pools: Pools, table: RowTable, hidden: Tensor, last_draws: Tensor | None
    ) -> Tensor:
        """Enqueue the predictions. Return int64 [sum of counts]: the first token of each row, then the second, ….

        hidden: [tokens, size], the step's hidden states. last_draws: like `draws`, as verified; None without drafts.
        """
        draws = (self.draws if last_draws is None else last_draws)[self.drawing]
        tokens, states, positions = table.last_token[self.rows], hidden[self.at[draws]], self.positions[draws]
        pages = table.pages[self.rows, : self.width]
        predicted = list[Tensor]()
        for number in range(self.counts[0]):
            n = sum(count > number for count in self.counts)
            at = positions[:n] + number
            states = model.predict(tokens[:n], states[:n], Decode(at, at, pages[:n]), pools)
            tokens = model.logits(states).argmax(-1)
            predicted.append(tokens)
        return torch.cat(predicted)

    def by_row(self, tokens: Sequence[int]) -> dict[int, list[int]]:
        """Return the tokens of each row. tokens: the result of `predict`."""
        result: dict[int, list[int]] = {row: [] for row in self.indices}
        rest = iter(tokens)
        for number in range(self.counts[0]):
            for row, count in zip(self.indices, self.counts, strict=True):
                if count > number:
                    result[row].append(next(rest))
        return result


def pack_predictions(
    inbox: Inbox, work: Work, draws: Draws, table: RowTable, page_size: int
) -> PackedPredictions | None:
    """Pack the predictions of a step; None if there are none.

    A row gets at most as many as its pages have space for: each takes the place of a token's keys and values.
    """
    if not work.predictions:
        return None
    last = {row: draw for draw, row in enumerate(draws.rows)}  # a row's draws follow one another
    rows = list(last)
    room = {p.row: table[p.row].page_count * page_size - draws.positions[last[p.row]] for p in work.predictions}
    counts = {p.row: min(p.tokens, room[p.row]) for p in work.predictions}
    chosen = sorted((row for row, count in counts.items() if count > 0), key=lambda row: -counts[row])
    if not chosen:
        return None
    ends = max(draws.positions[last[row]] + counts[row] for row in chosen)
    return PackedPredictions(
        [counts[row] for row in chosen],
        chosen,
        inbox.put(chosen),
        inbox.put([rows.index(row) for row in chosen]),
        inbox.put(list(last.values())),
        inbox.put(draws.at),
        inbox.put(draws.positions),
        -(-ends // page_size),
    )
