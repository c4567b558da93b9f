"""The forward loop without a server: what the relay is measured against."""

import time

import torch

from kernels.sampling import SamplingTensors, sample
from models.batch import Batch, Decode, Model, Prefill, allocate


class Bare:
    """Feeds the model from Python in steps of at most `step_tokens`, each sampled token back into the next step."""

    def __init__(self, model: Model, rows: int, step_tokens: int) -> None:
        self._model = model
        self._step_tokens = step_tokens
        self._pools = allocate(model, rows, 0, 1, torch.device("cpu"))

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second until the first token of the answer is drawn."""
        began = time.perf_counter()
        self._feed(prompt, 0)
        return len(prompt) / (time.perf_counter() - began)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second, of all prompts together, from their first drawn token on."""
        rows = len(prompts)
        tokens = torch.cat([self._feed(prompt, row) for row, prompt in enumerate(prompts)])
        start = len(prompts[0])
        began = time.perf_counter()
        for position in range(start, start + steps):
            positions = torch.full((rows,), position)
            decode = Decode(torch.arange(rows), positions, torch.zeros(rows, 0, dtype=torch.int32))
            hidden = self._model.forward(Batch(tokens, positions, None, decode), self._pools)
            tokens = self._draw(hidden, position + 1)
        return rows * steps / (time.perf_counter() - began)

    def _feed(self, prompt: list[int], slot: int) -> torch.Tensor:
        self._pools.clear(slot)
        hidden = torch.empty(0)
        for start in range(0, len(prompt), self._step_tokens):
            tokens = torch.tensor(prompt[start : start + self._step_tokens])
            prefill = Prefill([0, len(tokens)], [start], [slot], [], torch.zeros(1, 0, dtype=torch.int32))
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
