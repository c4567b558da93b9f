"""The forward loop without a server: what the relay is measured against."""

import time
from collections.abc import Iterator
from itertools import count, islice

import torch

from baton.kernels.sampling import SamplingTensors, sample
from baton.models.batch import Batch, Decode, Model, Prefill, allocate
from baton.models.recorded import recording

# Where the model has attention: of the first row while it is alone, and of each.
LONGEST, OF_A_ROW, PAGE_SIZE = 8192, 512, 16


class Bare:
    """Feeds the model from Python in steps of at most `step_tokens`, each sampled token back into the next step."""

    def __init__(self, model: Model, rows: int, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        pages = max(LONGEST, rows * OF_A_ROW) // PAGE_SIZE if model.kv_specs() else 0
        self._pools = allocate(model, rows, pages, PAGE_SIZE, torch.device("cpu"))
        self._model = recording(model, self._pools, rows, pages)
        self._pages = torch.arange(pages, dtype=torch.int32)
        self._of_a_row = OF_A_ROW // PAGE_SIZE if pages else 0
        self._table = self._pages[: rows * self._of_a_row].view(rows, self._of_a_row)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second until the first token of the answer is drawn."""
        began = time.perf_counter()
        self._feed(prompt, 0)
        return len(prompt) / (time.perf_counter() - began)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second, of all prompts together, from their first drawn token on."""
        generated = self.generate(prompts)
        next(generated)
        began = time.perf_counter()
        for _ in islice(generated, steps):
            pass
        return len(prompts) * steps / (time.perf_counter() - began)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> Iterator[torch.Tensor]:
        """Of prompts of one length each step's tokens, int64 [rows], without end."""
        rows = len(prompts)
        tokens = torch.cat([self._feed(prompt, row) for row, prompt in enumerate(prompts)])
        table = self._table[:rows] if rows > 1 else self._pages[None]
        for position in count(len(prompts[0])):
            yield tokens
            positions = torch.full((rows,), position)
            decode = Decode(torch.arange(rows), positions, table[:, : position // PAGE_SIZE + 1])
            hidden = self._model.forward(Batch(tokens, positions, None, decode), self._pools)
            tokens = self._draw(hidden, position + 1)

    def _feed(self, prompt: list[int], slot: int) -> torch.Tensor:
        self._pools.clear(slot)
        hidden = torch.empty(0)
        for start in range(0, len(prompt), self._step_tokens):
            tokens = torch.tensor(prompt[start : start + self._step_tokens])
            pages = self._pages[slot * self._of_a_row :][: -(-(start + len(tokens)) // PAGE_SIZE)]
            prefill = Prefill([0, len(tokens)], [start], [slot], [], pages[None])
            positions = torch.arange(start, start + len(tokens))
            hidden = self._model.forward(Batch(tokens, positions, prefill, None), self._pools)
        return self._draw(hidden[-1:], len(prompt))

    def _draw(self, hidden: torch.Tensor, position: int) -> torch.Tensor:
        rows = len(hidden)
        greedy = SamplingTensors(
            temperature=torch.zeros(rows),
            top_k=torch.zeros(rows, dtype=torch.int64),
            top_p=torch.ones(rows),
            min_p=torch.zeros(rows),
            seed=torch.zeros(rows, dtype=torch.int64),
            position=torch.full((rows,), position),
        )
        return sample(self._model.logits(hidden), greedy).tokens
