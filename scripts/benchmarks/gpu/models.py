"""The parts `models`, `idle` and `trace`: prefill and decode speeds, the GPU's idle share, and a trace."""

import gzip
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from baton.models.batch import Model
from baton.models.loading.checkpoint import random_model
from scripts.benchmarks.common.configs import GRANITE, MAMBA2
from scripts.benchmarks.common.floors import floor_of
from scripts.benchmarks.common.machine import Probe
from scripts.benchmarks.common.shapes import TINY
from scripts.benchmarks.gpu.bench import Bench
from scripts.benchmarks.gpu.stepping import Stepping
from scripts.benchmarks.gpu.timing import Ceilings, Run

# HYBRID_1B has about a billion parameters; HYBRID_9B has the sizes of Nemotron Nano 9B v2.
HYBRID_1B: dict[str, Any] = GRANITE | {
    "vocab_size": 100_352,
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": [*(["mamba"] * 9 + ["attention"]) * 4],
    "shared_intermediate_size": 2048,
    "intermediate_size": 2048,
    "mamba_n_heads": 48,
}
HYBRID_9B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131_072,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15_680,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
MODELS = {"130M": MAMBA2, "1B": HYBRID_1B, "9B": HYBRID_9B}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements."""

    batches: tuple[int, ...] = (1, 32, 256)
    prompt: int = 8192  # tokens of the prompt whose prefill is measured
    history: int = 64  # tokens of each row before the row decodes
    steps: int = 64  # measured decode steps


TOY = Sizes((1, 2), 70, 8, 4)


def models_of(bench: Bench) -> dict[str, dict[str, Any]]:
    return {"toy": TINY} if bench.is_toy else MODELS


def sizes_of(bench: Bench) -> Sizes:
    return TOY if bench.is_toy else Sizes()


def random_of(config: dict[str, Any], bench: Bench) -> Model:
    return random_model(config, bench.dtype, bench.device, seed=0)


def speeds(bench: Bench) -> None:
    """Record `tokens_per_second`, and as `share` its ratio to the upper bound from the ceilings of this run."""
    ceilings, sizes = Ceilings.measured(bench.device), sizes_of(bench)
    probe = Probe(ceilings.bandwidth, ceilings.bandwidth, ceilings.rate)
    bench.records.keep("models", "ceilings", bandwidth=ceilings.bandwidth, rate=ceilings.rate)
    for name, config in models_of(bench).items():
        cells = {rows: f"{name} decode {rows}" for rows in sizes.batches}
        if all(bench.records.has("models", cell) for cell in cells.values()):
            continue
        model, floor = random_of(config, bench), floor_of(config)
        rate = prefill_rate(model, sizes, bench.device)
        share = rate / floor.prefill(probe, sizes.prompt)
        bench.records.keep("models", f"{name} prefill", tokens_per_second=rate, share=share)
        for rows, cell in cells.items():
            rate = decode_rate(model, rows, sizes, bench.device)
            most = floor.decode(rows, probe, sizes.history + 3 * sizes.steps // 2)
            bench.records.keep("models", cell, tokens_per_second=rate, share=rate / most)


def prefill_rate(model: Model, sizes: Sizes, device: torch.device) -> float:
    """Return tokens per second of one long prompt, read in one step."""
    stepping = Stepping(model, 1, sizes.prompt + 1, device)
    return sizes.prompt / statistics.median(stepping.read(sizes.prompt) for _ in range(4))


def decode_rate(model: Model, rows: int, sizes: Sizes, device: torch.device) -> float:
    """Return decoded tokens per second, summed over all rows."""
    stepping = decoding(model, rows, sizes, device)
    began = time.perf_counter()
    stepping.decode(sizes.steps)
    return rows * sizes.steps / (time.perf_counter() - began)


def decoding(model: Model, rows: int, sizes: Sizes, device: torch.device) -> Stepping:
    """Return rows that are ready to decode, after some decode steps that warm up."""
    stepping = Stepping(model, rows, sizes.history + 8 * sizes.steps, device)
    stepping.begin(sizes.history)
    stepping.decode(sizes.steps)
    return stepping


def idle(bench: Bench) -> None:
    """Record the host's and the device's milliseconds per decode step, and the share of time in which the GPU idles."""
    sizes = sizes_of(bench)
    for name, config in models_of(bench).items():
        cells = {rows: f"{name} decode {rows}" for rows in sizes.batches}
        if all(bench.records.has("idle", cell) for cell in cells.values()):
            continue
        model = random_of(config, bench)
        for rows, cell in cells.items():
            bench.records.keep("idle", cell, **steps_of(model, rows, bench))


def steps_of(model: Model, rows: int, bench: Bench) -> dict[str, float | None]:
    """Return the figures of `idle`: time some steps, then trace other steps, because tracing slows steps down."""
    sizes, file = sizes_of(bench), bench.folder / "idle.json"
    stepping = decoding(model, rows, sizes, bench.device)
    began = time.perf_counter()
    launching, running = stepping.decode(sizes.steps)
    elapsed = time.perf_counter() - began
    traced(partial(stepping.decode, sizes.steps), bench.device, file)
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    return {
        "step_ms": elapsed / sizes.steps * 1e3,
        "host_ms": statistics.median(launching) * 1e3,
        "device_ms": statistics.median(running) * 1e3,
        "idle_share": idle_share(events),
    }


def trace(bench: Bench) -> None:
    """Write a trace of some prompts and their first tokens, for chrome://tracing or Perfetto."""
    sizes = sizes_of(bench)
    for name, config in models_of(bench).items():
        packed = bench.folder / f"trace-{name}.json.gz"
        stepping = decoding(random_of(config, bench), sizes.batches[1], sizes, bench.device)

        def prompts_and_tokens(stepping: Stepping = stepping) -> None:
            stepping.begin(sizes.history)
            stepping.decode(8)

        file = packed.with_suffix("")
        traced(prompts_and_tokens, bench.device, file)
        packed.write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
        bench.records.keep("trace", name, file=packed.name)


def traced(run: Run, device: torch.device, file: Path) -> None:
    """Call `run` under torch's profiler, and write the trace to `file`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        run()
    profiled.export_chrome_trace(str(file))


def idle_share(events: list[dict[str, Any]]) -> float | None:
    """Return the idle share of the time between a GPU's first and last work in a trace, or None if there is no work."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = [each for each in events if each.get("cat") in kinds]
    spans: list[tuple[float, float]] = sorted((each["ts"], each["ts"] + each["dur"]) for each in work)
    if not spans:
        return None
    idle, until = 0.0, spans[0][1]
    for begin, end in spans:
        idle, until = idle + max(0.0, begin - until), max(until, end)
    return idle / (until - spans[0][0])
