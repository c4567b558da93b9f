"""The model size from which several threads pay off: tokens per second of one row, by size and threads."""

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.prepare import prepare
from baton.models.loading.checkpoint import random_model
from scripts.benchmarks.common.bare import Bare
from scripts.benchmarks.common.configs import MAMBA2
from scripts.benchmarks.common.contenders import Workbench

# (hidden size, layers, vocabulary) of each model
SHAPES = ((192, 5, 256), (256, 10, 4096), (384, 16, 8192), (512, 20, 32_000), (768, 24, 50_288))
STEPS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this command has only the common options."""


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    prepare().install(options.threads)
    measure(MAMBA2, options.threads, options.rounds or 11)


def measure(config: dict[str, Any], threads: int, rounds: int) -> None:
    """Print the median speeds with one thread and with `threads` threads, and the ratio of both speeds.

    Each round measures both speeds. The ratio is shown as its median and the range of its middle half.
    """
    print(f"{'10^6 weights':<12}{'1 thread':>10}{f'{threads} threads':>12}{'ratio':>8}  middle half")
    for hidden, layers, vocabulary in SHAPES:
        shape = {
            "hidden_size": hidden,
            "num_heads": hidden // 32,
            "num_hidden_layers": layers,
            "vocab_size": vocabulary,
        }
        model = random_model(config | shape, torch.bfloat16, torch.device("cpu"), seed=0)
        assert isinstance(model, nn.Module)
        parameters = sum(tensor.numel() for tensor in model.parameters())
        pairs = [(decode(model, 1), decode(model, threads)) for _ in range(rounds + 1)][1:]
        ratios = sorted(many / one for one, many in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        one, many = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"{parameters / 1e6:<12.1f}{one:>10.1f}{many:>12.1f}{middle:>8.2f}  {low:.2f} to {high:.2f}", flush=True)


def decode(model: Any, threads: int) -> float:
    cpp.use_threads(threads)
    return Bare(model, rows=1, step_tokens=16).decode([[1, 2, 3]], STEPS)
