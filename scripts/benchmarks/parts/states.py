"""States in bfloat16 against states in float32: accuracy and speed.

Accuracy is measured at marks: a mark is a number of tokens that each row has decoded.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.kernels.runtime.cpp.prepare import prepare
from baton.models.batch import Batch, Decode, Model, allocate
from baton.models.loading.checkpoint import load_model, random_model
from scripts.benchmarks.common.bare import Bare
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.shapes import BUNDLED

Load = Callable[[torch.dtype], Model]
BATCHES = (1, 4, 16, 64)
PROMPT_TOKENS, STEPS = 16, 16
PAGE = 64
WINDOW = 16  # the divergence is averaged over this many steps after a mark


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens that each row decodes")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    prepare().install(options.threads)
    measure(workbench.config, options.rows, options.tokens, options.rounds or 5)


@dataclass(frozen=True)
class Error:
    """The error of the logits of all rows, in the WINDOW steps after a mark (a number of decoded tokens)."""

    divergence: float  # mean KL divergence, in nats
    worst: float  # largest KL divergence, in nats
    same: float  # share of positions at which float32 states have the same likeliest token


def measure(config: dict[str, Any], rows: int, tokens: int, rounds: int) -> None:
    """Print errors of the bundled model and of a random bfloat16 model, and speeds of the random model.

    config: config.json of the random model.
    """

    def bundled(states: torch.dtype) -> Model:
        return load_model(BUNDLED, None, torch.device("cpu"), state_dtype=states)

    def of_config(states: torch.dtype) -> Model:
        return random_model(config, torch.bfloat16, torch.device("cpu"), seed=0, state_dtype=states)

    for name, load in (("the bundled model", bundled), ("the random model", of_config)):
        print(name)
        measure_errors(load, rows, sorted({1, 100, tokens}))
    measure_speeds(of_config, rounds)


def measure_errors(load: Load, rows: int, marks: list[int], seed: int = 0) -> None:
    """Print how far the logits of each contender are from the logits of the model with float32 states.

    All contenders are fed the tokens that the model with float32 states draws.
    """
    exact = Contender(load(torch.float32), rows, marks[-1] + WINDOW)
    contenders = {
        "bfloat16": Contender(load(torch.bfloat16), rows, marks[-1] + WINDOW),
        "to the nearest": Nearest(load(torch.float32), rows, marks[-1] + WINDOW),
    }
    found: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
    for position, expected in exact.draw(torch.Generator().manual_seed(seed)):
        mark = next((mark for mark in marks if mark <= position < mark + WINDOW), None)
        for name, contender in contenders.items():
            logits = contender.step(exact.tokens, position)
            if mark is not None:
                found.setdefault((mark, name), []).append((expected, logits))
    print(f"{'KL in nats':<16}{'after tokens':>14}{'mean':>12}{'worst':>12}{'same best':>12}", flush=True)
    for (mark, name), pairs in found.items():
        error = compare(torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]))
        print(f"{name:<16}{mark:>14,}{error.divergence:>12.2e}{error.worst:>12.2e}{error.same:>12.3f}")


class Contender:
    """A model and its pools; each step feeds every row one token."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model, self.rows, self.length = model, rows, length
        pages = -(-length // PAGE)
        self.pools = allocate(model, rows, rows * pages, PAGE, torch.device("cpu"))
        self.table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        self.tokens = torch.zeros(rows, dtype=torch.int64)

    @torch.inference_mode()
    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Feed one token per row and return the logits, float32 [rows, vocabulary]."""
        positions = torch.full((self.rows,), position)
        decode = Decode(torch.arange(self.rows), positions, self.table[:, : position // PAGE + 1])
        hidden = self.model.forward(Batch(tokens, positions, None, decode), self.pools)
        return self.model.logits(hidden)

    def draw(self, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Yield each position with its logits, and draw the next tokens from these logits.

        At each yield, `self.tokens` are the tokens that were fed at this position.
        """
        self.tokens = torch.randint(min(self.model.vocab_size, 256), (self.rows,), generator=generator)
        for position in range(self.length):
            logits = self.step(self.tokens, position)
            yield position, logits
            self.tokens = logits.softmax(-1).multinomial(1, generator=generator)[:, 0]


class Nearest(Contender):
    """A model that emulates bfloat16 states without stochastic rounding: it rounds to nearest after each step."""

    def step(self, tokens: Tensor, position: int) -> Tensor:
        logits = super().step(tokens, position)
        # Convolution inputs and recurrent states alternate; only recurrent states may be bfloat16.
        for states in self.pools.state[1::2]:
            states.copy_(states.bfloat16())
        return logits


def compare(exact: Tensor, found: Tensor) -> Error:
    """Return the error of the logits `found` against the logits `exact`, both [N, vocabulary]."""
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    divergences = (p.exp() * (p - q)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).double().mean()
    return Error(float(divergences.mean()), float(divergences.max()), float(same))


def measure_speeds(load: Load, rounds: int) -> None:
    """Print decoding speeds of the bare loop with float32 and with bfloat16 states, alternately measured.

    The first round warms up and is dropped.
    """
    models = {dtype: load(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(f"{'tokens/s':<16}{'float32':>10}{'bfloat16':>10}{'ratio':>8}  from, to")
    for batch in BATCHES:
        prompts = [[row + 1] * PROMPT_TOKENS for row in range(batch)]
        sides = [Bare(model, batch, PROMPT_TOKENS) for model in models.values()]
        pairs = [[side.decode(prompts, STEPS) for side in sides] for _ in range(rounds + 1)][1:]
        ratios = [narrow / wide for wide, narrow in pairs]
        wide, narrow = (statistics.median(side) for side in zip(*pairs, strict=True))
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
        print(f"decode {batch:<9}{wide:>10.1f}{narrow:>10.1f}{statistics.median(ratios):>8.2f}  {spread}", flush=True)
