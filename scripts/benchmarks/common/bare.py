"""The bare loop: the model, run from Python without a server. The difference in speed is the server's overhead."""

import time
from collections.abc import Iterator
from itertools import count, islice

import torch

from baton.kernels.sampling import SamplingTensors, sample
from baton.models.batch import Batch, Decode, Model, Prefill, allocate
from baton.models.recorded import recording

# For models with attention, in tokens: KV capacity of a row that runs alone and of each row of a batch; page size.
LONGEST, ROW_TOKENS, PAGE_SIZE = 8192, 512, 16


class Bare:
    """A greedy decoding loop without a server. It reads prompts in steps of at most `step_tokens` tokens."""

    def __init__(self, model: Model, rows: int, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        pages = max(LONGEST, rows * ROW_TOKENS) // PAGE_SIZE if model.kv_specs() else 0
        self._pools = allocate(model, rows, pages, PAGE_SIZE, torch.device("cpu"))
        self._model = recording(model, self._pools, rows, pages)
        self._pages = torch.arange(pages, dtype=torch.int32)
        self._pages_per_row = ROW_TOKENS // PAGE_SIZE if pages else 0
        self._table = self._pages[: rows * self._pages_per_row].view(rows, self._pages_per_row)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Return prompt tokens per second; the time ends when the first token of the answer is drawn."""
        began = time.perf_counter()
        self._feed(prompt, 0)
        return len(prompt) / (time.perf_counter() - began)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Return tokens per second, summed over all rows; the time begins after the first drawn token."""
        generated = self.generate(prompts)
        next(generated)
        began = time.perf_counter()
        for _ in islice(generated, steps):
            pass
        return len(prompts) * steps / (time.perf_counter() - began)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> Iterator[torch.Tensor]:
        """Yield the tokens of each decode step, int64 [rows], without end. All prompts must have the same length."""
        rows = len(prompts)
        tokens = torch.cat([self._feed(prompt, row) for row, prompt in enumerate(prompts)])
        # A row that runs alone may use all pages; each row of a batch has a fixed share of the pages.
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
            pages = self._pages[slot * self._pages_per_row :][: -(-(start + len(tokens)) // PAGE_SIZE)]
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
