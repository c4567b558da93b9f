"""A server whose draws are overruled by written answers: `python -m … ANSWERS serve …`, for scripts/bench drafts.

ANSWERS: a JSON file of pairs of a prompt and its answer, in tokens.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.actors.forward.step.drawing import draws_of
from baton.actors.forward.step.packed import PackedStep
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request
from baton.actors.tokens import pack
from baton.api import cli
from baton.api.machine import device

CERTAIN = 1e6  # a logit that is always drawn
ANSWERS: dict[bytes, Sequence[int]] = {}  # by packed prompt


class OverruledDevice(TorchDevice):
    """The device, with the logits of written answers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers: dict[int, tuple[int, Sequence[int]]] = {}  # by row: the prompt's length, and the answer

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        super().open_row(row, grant, slot, request, pages)
        prompt = request.tokens[: 4 * request.prompt_len]
        self._answers[row] = request.prompt_len, ANSWERS.get(prompt, ())

    def _draw(self, step: PackedStep, logits: Tensor) -> Any:
        draws = draws_of(step.work)
        places = list[int]()
        for row, position in zip(draws.rows, draws.positions, strict=True):
            first, answer = self._answers[row]
            places.append(answer[position - first] if position - first < len(answer) else 0)
        logits[torch.arange(len(places)), torch.tensor(places)] = CERTAIN
        return super()._draw(step, logits)


if __name__ == "__main__":
    file = sys.argv.pop(1)
    ANSWERS.update({pack(prompt): answer for prompt, answer in json.loads(Path(file).read_text())})
    device.TorchDevice = OverruledDevice  # type: ignore[misc]
    sys.exit(cli.main())
