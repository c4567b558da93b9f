"""What weights as integers cost in what a model says, and what they give in speed."""

import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.actors.runtime.sizing import weight_bytes
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.bandwidth import read_bandwidth
from baton.models.batch import Batch, Model, Prefill, allocate
from baton.models.layers.linear import pack, project
from baton.models.loading.checkpoint import load_model, random_model
from baton.models.text.tokenizer import load_text
from scripts.benchmarks.bare import Bare
from scripts.demo.lessons import LESSONS, make_chat
from scripts.demo.text import plain

CPU = torch.device("cpu")
BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
BITS = {"bfloat16": None, "int8": 8, "int4": 4}
PAGE_SIZE, CHUNK = 16, 256
BATCHES = (1, 4, 16)
PROMPT_TOKENS, SHORT_PROMPT_TOKENS, STEP_TOKENS = 2048, 16, 512
PROJECTION, COPIES = (3352, 768), 24
Load = Callable[[torch.dtype, int | None], Model]


def measure(config: dict[str, Any], threads: int, rounds: int, steps: int, tokens: int) -> None:
    """tokens: of each text on which errors are measured. config: of the random model, whose speed is measured."""

    def bundled(dtype: torch.dtype, bits: int | None) -> Model:
        return load_model(BUNDLED, dtype, CPU, bits=bits)

    def random_weights(dtype: torch.dtype, bits: int | None) -> Model:
        return random_model(config, dtype, CPU, seed=0, bits=bits)

    drawn = [random.Random(0).randrange(config["vocab_size"]) for _ in range(tokens)]
    show_errors("the bundled model, on chats", bundled, some_chats(tokens))
    show_errors("random weights, on random tokens", random_weights, drawn)
    show_projection(rounds * 4)
    cpp.use_threads(threads)
    show_speeds({name: random_weights(torch.bfloat16, bits) for name, bits in BITS.items()}, threads, rounds, steps)


def some_chats(tokens: int) -> list[int]:
    """Chats as the bundled model was trained on, but with a seed of their own."""
    rng, text, ids = random.Random(20261122), load_text(BUNDLED), list[int]()
    while len(ids) < tokens:
        chat = make_chat(rng, LESSONS[-1][1])
        ids += text.encode_chat(plain(chat.messages(), chat.schemas()))[0]
    return ids[:tokens]


def show_errors(what: str, load: Load, ids: list[int]) -> None:
    """Against the same model in float32, in nats; and how often the likeliest token is the same."""
    print(f"{what}: KL to float32 over {len(ids)} tokens")
    print(f"{'':<18}{'mean':>10}{'p99':>10}{'largest':>10}{'same first':>12}")
    exact = load(torch.float32, None)
    for name, bits in BITS.items():
        for dtype in (torch.bfloat16,) if bits is None else (torch.bfloat16, torch.float32):
            divergences, same = compare(exact, load(dtype, bits), ids)
            mean, p99, most = divergences.mean(), divergences.quantile(0.99), divergences.max()
            told = name if bits is None else f"{name}, {str(dtype).removeprefix('torch.')}"
            print(f"{told:<18}{mean:>10.2e}{p99:>10.2e}{most:>10.2e}{same:>12.2%}", flush=True)
    print()


@torch.inference_mode()
def compare(exact: Model, other: Model, ids: list[int]) -> tuple[Tensor, float]:
    """KL(exact ‖ other) at each position: float64 [len(ids)]; and the part of them with the same likeliest token."""
    divergences, same = list[Tensor](), list[Tensor]()
    for left, right in zip(log_probabilities(exact, ids), log_probabilities(other, ids), strict=True):
        divergences.append((left.exp() * (left - right)).sum(1))
        same.append(left.argmax(1) == right.argmax(1))
    return torch.cat(divergences), float(torch.cat(same).double().mean())


def log_probabilities(model: Model, ids: list[int]) -> Any:
    """Those of each next token, some positions at a time: float64 [CHUNK, vocabulary]."""
    pages = -(-len(ids) // PAGE_SIZE)
    pools, table = allocate(model, 1, pages, PAGE_SIZE, CPU), torch.arange(pages, dtype=torch.int32)[None]
    for start in range(0, len(ids), CHUNK):
        tokens = torch.tensor(ids[start : start + CHUNK])
        prefill = Prefill([0, len(tokens)], [start], [0], [], table)
        hidden = model.forward(Batch(tokens, torch.arange(start, start + len(tokens)), prefill, None), pools)
        yield model.logits(hidden).double().log_softmax(1)


def show_projection(rounds: int) -> None:
    """Of one thread, in turns: how many times as fast as bfloat16 weights. Too many copies to stay in a cache."""
    cpp.use_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*PROJECTION, generator=generator).bfloat16() for _ in range(COPIES)]
    laid = {name: [pack(weight, bits) or weight for weight in weights] for name, bits in BITS.items()}
    print(f"{f'a projection of {PROJECTION}, one thread, to bfloat16':<54}" + "".join(f"{name:>10}" for name in laid))
    for rows in (1, 4, 16, 64):
        x, calls = torch.randn(rows, PROJECTION[1]).bfloat16(), {name: list[float]() for name in laid}
        for _ in range(rounds):
            for name, copies in laid.items():
                calls[name] += [time_of(x, weight) for weight in copies]
        # What other processes take is in the slower calls.
        undisturbed = {name: statistics.quantiles(found, n=10)[0] for name, found in calls.items()}
        ratios = [undisturbed["bfloat16"] / taken for taken in undisturbed.values()]
        print(f"{f'rows: {rows}':<54}" + "".join(f"{ratio:>10.2f}" for ratio in ratios), flush=True)
    print()


def time_of(x: Tensor, weight: Any) -> float:
    began = time.perf_counter()
    project(x, weight, None)
    return time.perf_counter() - began


def show_speeds(models: dict[str, Model], threads: int, rounds: int, steps: int) -> None:
    """Tokens a second of the bare loop, in turns; the first round is not counted."""
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
    print(f"bare loop, {threads} threads, {rounds} rounds in turns; read bandwidth {spread(bandwidths)}")
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
    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(256) for _ in range(tokens)]

    long, short = prompt(PROMPT_TOKENS), [prompt(SHORT_PROMPT_TOKENS) for _ in range(max(BATCHES))]
    found = {(f"prefill {PROMPT_TOKENS}", name): loops[name].prefill(long) for name in order}
    for batch in BATCHES:
        found |= {(f"decode {batch}", name): loops[name].decode(short[:batch], steps) for name in order}
    return found


def floor_of(model: Model, rows: int, bandwidth: float) -> float:
    """Tokens a second if nothing took time but reading weights, and reading and writing states."""
    states = 2 * rows * sum(spec.nbytes for spec in model.state_specs())
    return rows * bandwidth / (weight_bytes(model) + states)


def spread(bandwidths: list[float]) -> str:
    return f"{min(bandwidths) / 1e9:.0f} to {max(bandwidths) / 1e9:.0f} GB/s"
