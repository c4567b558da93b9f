"""A server whose draws are overruled by written answers: `python -m … ANSWERS RIGHT serve …`, for scripts/bench drafts.

ANSWERS: a JSON file of pairs of a prompt and its answer, in tokens.
RIGHT: how likely each token is the answer's that the model's head predicts.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.actors.forward.device import WorkMask
from baton.actors.forward.step.drawing import draws_of
from baton.actors.forward.step.packed import PackedStep
from baton.actors.forward.step.reporting import CopiedLogprobs
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request
from baton.actors.tokens import pack
from baton.api import cli
from baton.api.machine import device

CERTAIN = 1e6  # a logit that is always drawn
RIGHT = 0.0
ANSWERS: dict[bytes, Sequence[int]] = {}  # the written answer to each packed prompt


class OverruledDevice(TorchDevice):
    """The device, with the logits of written answers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._chance = random.Random(0)
        self._answers: dict[int, tuple[int, Sequence[int]]] = {}  # by row: the prompt's length, and the answer

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        super().open_row(row, grant, slot, request, pages)
        prompt = request.tokens[: 4 * request.prompt_len]
        self._answers[row] = request.prompt_len, ANSWERS.get(prompt, ())

    def _predict(self, step: PackedStep, hidden: Tensor | None, last_draws: Tensor | None) -> Tensor | None:
        """Predict as the head does, and return other tokens."""
        predicted, packed = super()._predict(step, hidden, last_draws), step.predictions
        if predicted is None or packed is None:
            return predicted
        drawn = packed.positions[(packed.draws if last_draws is None else last_draws)[packed.drawing]].tolist()
        tokens = list[int]()
        for number in range(packed.counts[0]):
            for row, position, count in zip(packed.indices, drawn, packed.counts, strict=True):
                if count > number:
                    tokens.append(self._foretold(row, position + 1 + number))
        return torch.tensor(tokens)

    def _foretold(self, row: int, position: int) -> int:
        first, answer = self._answers[row]
        right = answer[position - first] if position - first < len(answer) else 0
        return right if self._chance.random() < RIGHT else right + 1 - 2 * (right > 0)

    def _draw(
        self, step: PackedStep, logits: Tensor, late: list[WorkMask]
    ) -> tuple[Tensor, CopiedLogprobs | None, Tensor | None]:
        draws = draws_of(step.work)
        places = list[int]()
        for row, position in zip(draws.rows, draws.positions, strict=True):
            first, answer = self._answers[row]
            places.append(answer[position - first] if position - first < len(answer) else 0)
        logits[torch.arange(len(places)), torch.tensor(places)] = CERTAIN
        return super()._draw(step, logits, late)


if __name__ == "__main__":
    file, RIGHT = sys.argv.pop(1), float(sys.argv.pop(1))
    ANSWERS.update({pack(prompt): answer for prompt, answer in json.loads(Path(file).read_text())})
    vars(device)["TorchDevice"] = OverruledDevice  # make_device makes it
    sys.exit(cli.main())
