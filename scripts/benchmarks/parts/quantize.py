"""Integer weights: their error against float32, and their speed against bfloat16."""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.actors.runtime.sizing import weight_bytes
from baton.kernels.linear import int8_activations
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.bandwidth import read_bandwidth
from baton.kernels.runtime.cpp.prepare import prepare
from baton.models.batch import Batch, Model, Prefill, allocate
from baton.models.layers.linear import pack, project
from baton.models.loading.checkpoint import load_model, random_model
from baton.models.loading.integers import round_inputs
from baton.models.text.tokenizer import load_text
from scripts.benchmarks.common.bare import Bare
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.shapes import BUNDLED, SHAPES, config_of
from scripts.benchmarks.common.trained import imitate_training
from scripts.benchmarks.parts.rounding import ALL, INTEGERS, PARTS, errors_by_part
from scripts.demo.lessons import LESSONS, make_chat
from scripts.demo.text import plain

CPU = torch.device("cpu")
BITS = {"bfloat16": None, "int8": 8, "int4": 4}
PAGE_SIZE, CHUNK = 16, 256
BATCHES = (1, 4, 16)
PROMPT_TOKENS, SHORT_PROMPT_TOKENS, STEP_TOKENS = 2048, 16, 512
PROJECTION, COPIES = (3352, 768), 24
PARTED = ("bundled", *(name for name in SHAPES if name not in ("tiny", "null")))
PART_LAYERS, PART_VOCABULARY, PART_TOKENS = 4, 4096, 256
Load = Callable[[torch.dtype, int | None], Model]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2048, help="length of the texts on which errors are measured")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded in each measurement")
    parser.add_argument("--parts", nargs="*", choices=PARTED, default=PARTED, help="models whose parts are rounded")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    # These are loaded before native kernels are installed, so that their weights stay unpacked.
    unpacked = {name: unpacked_model(name, options.layers or PART_LAYERS, options.tokens) for name in options.parts}
    prepare().install(options.threads)
    cpp.use_threads(options.threads)
    for bits in (8, 4):
        show_parts(unpacked, bits)
    measure(workbench.config, options.threads, options.rounds or 5, options.steps, options.tokens)


def measure(config: dict[str, Any], threads: int, rounds: int, steps: int, tokens: int) -> None:
    """Print errors and speeds.

    config: config.json of the model with random weights, whose errors and speed are measured.
    steps: tokens decoded in each speed measurement.
    tokens: length of each text on which errors are measured.
    """

    def bundled(dtype: torch.dtype, bits: int | None) -> Model:
        return load_model(BUNDLED, dtype, CPU, bits=bits)

    def random_weights(dtype: torch.dtype, bits: int | None) -> Model:
        return random_model(config, dtype, CPU, seed=0, bits=bits)

    rng = random.Random(0)
    drawn = [rng.randrange(config["vocab_size"]) for _ in range(tokens)]
    show_errors("the bundled model, on chats", bundled, some_chats(tokens))
    show_errors("random weights, on random tokens", random_weights, drawn)
    show_projection(rounds * 4)
    cpp.use_threads(threads)
    show_speeds({name: random_weights(torch.bfloat16, bits) for name, bits in BITS.items()}, threads, rounds, steps)


def unpacked_model(name: str, layers: int, tokens: int) -> tuple[Model, list[int]]:
    """Return a float32 model, and tokens for it: the bundled model, or one of a family that imitates a trained one."""
    if name == "bundled":
        return load_model(BUNDLED, torch.float32, CPU), some_chats(tokens)
    model = random_model(config_of(name, layers) | {"vocab_size": PART_VOCABULARY}, torch.float32, CPU, seed=0)
    imitate_training(model, seed=1)
    rng = random.Random(0)
    return model, [rng.randrange(PART_VOCABULARY) for _ in range(min(tokens, PART_TOKENS))]


def show_parts(models: dict[str, tuple[Model, list[int]]], bits: int) -> None:
    """Print the mean KL divergence from float32 weights if only one part of a model is rounded, and if all are."""
    print(f"int{bits} by part: mean KL to float32, in nats; arithmetic in float32")
    columns = (*PARTS, ALL, INTEGERS)
    print(f"{'':<22}" + "".join(f"{name:>18}" for name in columns))
    for name, (model, ids) in models.items():

        def predict(model: Model, ids: list[int] = ids) -> Tensor:
            return torch.cat(list(log_probabilities(model, ids)))

        errors = errors_by_part(model, bits, predict)
        print(f"{name:<22}" + "".join(f"{figure(errors.get(part)):>18}" for part in columns), flush=True)
    print()


def figure(error: float | None) -> str:
    return "" if error is None else f"{error:.2e}"


def some_chats(tokens: int) -> list[int]:
    """Return the tokens of chats like those that the bundled model was trained on, from another seed."""
    rng, text, ids = random.Random(20261122), load_text(BUNDLED), list[int]()
    while len(ids) < tokens:
        chat = make_chat(rng, LESSONS[-1][1])
        ids += text.encode_chat(plain(chat.messages(), chat.schemas()))[0]
    return ids[:tokens]


def show_errors(what: str, load: Load, ids: list[int]) -> None:
    """Print, for each type of weights, the KL divergence from float32 weights, in nats, and the share `same first`.

    A line names the types of weights and activations. "to int8": the inputs of integers are rounded to 8 bits.
    `same first` is the share of positions at which float32 weights have the same likeliest token.
    """
    print(f"{what}: KL to float32 over {len(ids)} tokens")
    print(f"{'':<24}{'mean':>10}{'p99':>10}{'largest':>10}{'same first':>12}")
    exact = load(torch.float32, None)
    for name, bits in BITS.items():
        for dtype in (torch.bfloat16,) if bits is None else (torch.bfloat16, torch.float32):
            model = load(dtype, bits)
            label = name if bits is None else f"{name}, {str(dtype).removeprefix('torch.')}"
            show_error(label, exact, model, ids)
            if bits is not None and int8_activations.pays():
                assert round_inputs(model)
                show_error(f"{label} to int8", exact, model, ids)
    print()


def show_error(label: str, exact: Model, model: Model, ids: list[int]) -> None:
    divergences, same = compare(exact, model, ids)
    mean, p99, most = divergences.mean(), divergences.quantile(0.99), divergences.max()
    print(f"{label:<24}{mean:>10.2e}{p99:>10.2e}{most:>10.2e}{same:>12.2%}", flush=True)


@torch.inference_mode()
def compare(exact: Model, other: Model, ids: list[int]) -> tuple[Tensor, float]:
    """Return KL(exact ‖ other) at each position, float64 [len(ids)], and how often the likeliest token is the same."""
    divergences, same = list[Tensor](), list[Tensor]()
    for left, right in zip(log_probabilities(exact, ids), log_probabilities(other, ids), strict=True):
        divergences.append((left.exp() * (left - right)).sum(1))
        same.append(left.argmax(1) == right.argmax(1))
    return torch.cat(divergences), float(torch.cat(same).double().mean())


def log_probabilities(model: Model, ids: list[int]) -> Any:
    """Yield the log probabilities of the next token, CHUNK positions at a time: float64 [CHUNK, vocabulary]."""
    pages = -(-len(ids) // PAGE_SIZE)
    pools, table = allocate(model, 1, pages, PAGE_SIZE, CPU), torch.arange(pages, dtype=torch.int32)[None]
    for start in range(0, len(ids), CHUNK):
        tokens = torch.tensor(ids[start : start + CHUNK])
        prefill = Prefill([0, len(tokens)], [start], [0], [], table)
        hidden = model.forward(Batch(tokens, torch.arange(start, start + len(tokens)), prefill, None), pools)
        yield model.logits(hidden).double().log_softmax(1)


def show_projection(rounds: int) -> None:
    """Print the speed of one projection on one thread, relative to bfloat16 weights.

    COPIES different weights take turns, so that no weight stays in the CPU's cache.
    """
    cpp.use_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*PROJECTION, generator=generator).bfloat16() for _ in range(COPIES)]
    packed = {name: [pack(weight, bits) or weight for weight in weights] for name, bits in BITS.items()}
    print(f"{f'a projection of {PROJECTION}, one thread, to bfloat16':<54}" + "".join(f"{name:>10}" for name in packed))
    for rows in (1, 4, 16, 64):
        x, calls = torch.randn(rows, PROJECTION[1]).bfloat16(), {name: list[float]() for name in packed}
        for _ in range(rounds):
            for name, copies in packed.items():
                calls[name] += [time_of(x, weight) for weight in copies]
        # The 10 % quantile counts, because other processes slow down many of the calls.
        undisturbed = {name: statistics.quantiles(found, n=10)[0] for name, found in calls.items()}
        ratios = [undisturbed["bfloat16"] / seconds for seconds in undisturbed.values()]
        print(f"{f'rows: {rows}':<54}" + "".join(f"{ratio:>10.2f}" for ratio in ratios), flush=True)
    print()


def time_of(x: Tensor, weight: Any) -> float:
    began = time.perf_counter()
    project(x, weight, None)
    return time.perf_counter() - began


def show_speeds(models: dict[str, Model], threads: int, rounds: int, steps: int) -> None:
    """Print tokens per second of the bare loop. Each round measures all models; the first round is dropped."""
    loops = {name: Bare(model, max(BATCHES), STEP_TOKENS) for name, model in models.items()}
    figures: dict[tuple[str, str], list[float]] = {}
    bandwidths, orders = list[float](), itertools.cycle(itertools.permutations(loops))
    rng = random.Random(0)
    for number in range(rounds + 1):
        found = one_round(loops, next(orders), rng, steps)
        if number > 0:
            bandwidths.append(read_bandwidth(threads))
            for key, figure in found.items():
                figures.setdefault(key, []).append(figure)
    print(f"bare loop, {threads} threads, {rounds} rounds; read bandwidth {spread(bandwidths)}")
    print(f"{'tokens/s':<14}{'':<10}{'median':>9}{'to bf16':>9}{'floor':>9}{'MB':>8}")
    for what in dict.fromkeys(what for what, _ in figures):
        for name, model in models.items():
            mine, plain = figures[what, name], figures[what, "bfloat16"]
            ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
            floor = (
                f"{floor_of(model, int(what.split()[1]), statistics.median(bandwidths)):.0f}"
                if "decode" in what
                else ""
            )
            size = f"{weight_bytes(model) / 1e6:.0f}"
            print(f"{what:<14}{name:<10}{statistics.median(mine):>9.0f}{ratio:>9.2f}{floor:>9}{size:>8}")


def one_round(
    loops: dict[str, Bare], order: tuple[str, ...], rng: random.Random, steps: int
) -> dict[tuple[str, str], float]:
    """Return tokens per second by (name of the measurement, name of the model)."""

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(256) for _ in range(tokens)]

    long, short = prompt(PROMPT_TOKENS), [prompt(SHORT_PROMPT_TOKENS) for _ in range(max(BATCHES))]
    found = {(f"prefill {PROMPT_TOKENS}", name): loops[name].prefill(long) for name in order}
    for batch in BATCHES:
        found |= {(f"decode {batch}", name): loops[name].decode(short[:batch], steps) for name in order}
    return found


def floor_of(model: Model, rows: int, bandwidth: float) -> float:
    """Return an upper bound of tokens per second: a step only reads the weights, and reads and writes the states."""
    states = 2 * rows * sum(spec.nbytes for spec in model.state_specs())
    return rows * bandwidth / (weight_bytes(model) + states)


def spread(bandwidths: list[float]) -> str:
    return f"{min(bandwidths) / 1e9:.0f} to {max(bandwidths) / 1e9:.0f} GB/s"
