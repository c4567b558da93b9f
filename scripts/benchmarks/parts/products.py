"""Native code's matrix products and torch's, with the same instruction set: for each target that this CPU can run."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.kernels.linear.compressed import native as compressed
from baton.kernels.linear.dense import cpu, native
from baton.kernels.linear.int8_activations import native as int8_activations
from baton.kernels.linear.quantized import native as integers, reference
from baton.kernels.linear.quantized.forms import INTEGERS, Form as WeightForm, Groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.build import build, key
from baton.kernels.runtime.cpp.cache import cache_folder, fetch, open_folder
from baton.kernels.runtime.cpp.compiler import find_compiler
from baton.kernels.runtime.cpp.targets import targets_here
from baton.models.gguf.blocks import BLOCKS
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.machine import cpu_name
from scripts.benchmarks.common.revisions import check_out
from scripts.benchmarks.parts.libraries import Calls, Library, agree, in_turns, library_of

SHAPES = ((768, 3352), (1536, 768), (2048, 8192), (4096, 4096), (768, 50288))
ROWS = (1, 4, 16, 64, 128, 512, 2048)
BLOCK_FORMATS = ("Q8_0", "Q4_K", "Q6_K")
ROUNDED = "rounded-"
"""Beginning of the names of kinds whose inputs are rounded to 8 bits."""
KINDS = (
    "bfloat16", "float32", "int8", "int4", "compressed", *BLOCK_FORMATS,
    *(f"{ROUNDED}{weights}" for weights in ("int8", "int4", *BLOCK_FORMATS)),
)  # fmt: skip
WEIGHT_BYTES = 200 << 20
"""Bytes of the weights in bfloat16 that products take in turn: more than the second cache, as a model's layers."""
# The best instructions that torch may use, for each target: names of oneDNN, ATen and MKL.
LIMITS = {
    "x86-64-v4-amx": ("AVX512_CORE_AMX", "avx512", "AVX512"),
    "x86-64-v4-bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "x86-64-v4-vnni": ("AVX512_CORE_VNNI", "avx512", "AVX512"),
    "x86-64-v4": ("AVX512_CORE", "avx512", "AVX512"),
    "x86-64-v3-vnni": ("AVX2_VNNI", "avx2", "AVX2"),
    "x86-64-v3": ("AVX2", "avx2", "AVX2"),
    "x86-64-v2": ("SSE41", "default", "SSE4_2"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        choices=LIMITS,
        help="measure this target in this process, where torch may use all of the CPU's instructions unless its "
        "environment limits it (LIMITS in the source); default: each in a process whose torch is limited alike",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="numbers of rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="types of the weights")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many shapes, the first ones")
    parser.add_argument(
        "--against",
        metavar="REVISION",
        help="compare with native code of this git revision instead of torch, for one target (default: the best); "
        "both get weights as this checkout packs them",
    )


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    if options.against:
        return compare(options, options.target or targets_here()[0].name, workbench.threads)
    if options.target:
        measure(options, workbench.threads)
        return 0
    names = [target.name for target in targets_here() if target.name in LIMITS]
    print(f"{cpu_name()}, {workbench.threads} threads: GFLOP/s, and native code's as a multiple of torch's")
    print("compressed: native code's with compressed weights, and as a multiple of its own with bfloat16")
    print("rounded-…: native code's with inputs rounded to 8 bits, and as a multiple of its own with bfloat16 inputs")
    return max(map(run_limited, names), default=0)


def run_limited(target: str) -> int:
    """Measure one target in a process whose torch may use no better instructions. Return the exit code."""
    onednn, aten, mkl = LIMITS[target]
    limits = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}
    print(f"\n{target}; torch with {onednn}\n", flush=True)
    return subprocess.run([sys.executable, *sys.argv, "--target", target], env=os.environ | limits).returncode


def measure(options: argparse.Namespace, threads: int) -> None:
    """Print a line for each type, shape and number of rows."""
    install(options.target, threads)
    for kind, inputs, outputs in cases(options):
        native_form, torch_form = forms(kind, inputs, outputs)
        for rows in options.rows:
            x = inputs_of(kind, rows, inputs)
            pairs = alternate(partial(native_form, x), partial(torch_form, x), max(options.rounds or 9, 2))
            show(kind, rows, inputs, outputs, pairs)


def compare(options: argparse.Namespace, target: str, threads: int) -> int:
    """Print the same lines for this checkout's native code and another revision's. Return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        tree = check_out(options.against, "kernels", Path(folder))
        here = Library(install(target, threads), threads)
        libraries = (here, library_of(options.against, tree, target, threads))
    print(f"{cpu_name()}, {target}, {threads} threads: GFLOP/s here and of {options.against}, and their ratio\n")
    for kind, inputs, outputs in cases(options):
        native_form, _ = forms(kind, inputs, outputs)
        for rows in options.rows:
            calls = Calls(native_form, inputs_of(kind, rows, inputs), count_of(inputs, outputs))
            note = "" if agree(calls, *libraries) else "  the results differ"
            show(kind, rows, inputs, outputs, in_turns(calls, libraries, max(options.rounds or 20, 2)), note)
    return 0


def cases(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return the kinds and shapes that are asked for: kind, inputs, outputs."""
    return [(kind, *shape) for kind in options.kinds for shape in SHAPES[: options.shapes]]


def inputs_of(kind: str, rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs).to(torch.float32 if kind == "float32" else torch.bfloat16)


def install(target: str, threads: int) -> Path:
    """Install native code for a target, and return its file. Raise SystemExit if this is impossible."""
    compiler, chosen = find_compiler(), next((each for each in targets_here() if each.name == target), None)
    if compiler is None or chosen is None:
        raise SystemExit(f"{target} needs a CPU that has it, and a C++ compiler")
    open_folder(cache_folder())
    path = fetch(cache_folder(), key(compiler, chosen), lambda path: build(compiler, chosen, path))
    cpp.install(path, threads)
    return path


Form = Callable[[Tensor], Tensor]


def forms(kind: str, inputs: int, outputs: int) -> tuple[Form, Form]:
    """Return the products of x with random weights of this kind, native code's and torch's.

    Weights of integers are compared with torch's product of the same weights in bfloat16: those before they were
    quantized, or those that GGUF blocks stand for. Compressed weights are compared with native code's product of
    bfloat16 weights, and rounded inputs with native code's product of the same weights and unrounded inputs.
    """
    count = count_of(inputs, outputs)
    if kind.startswith(ROUNDED):
        weights_kind = kind.removeprefix(ROUNDED)
        form = BLOCKS[weights_kind].form if weights_kind in BLOCKS else INTEGERS[int(weights_kind[3:])]
        groups = random_weights(form, inputs, outputs, count)
        return by_integers(groups, int8_activations.linear), by_integers(groups)
    if kind in BLOCK_FORMATS:
        groups = random_weights(BLOCKS[kind].form, inputs, outputs, count)
        return by_integers(groups), by_torch([each.numbers().bfloat16() for each in groups])
    weights = [(torch.randn(outputs, inputs) / inputs**0.5).bfloat16() for _ in range(count)]
    if kind == "float32":
        weights = [weight.float() for weight in weights]
    if kind == "compressed":
        return forms_compressed(weights, (outputs, inputs))
    if kind.startswith("int"):
        bits = int(kind[3:])
        quantized = [reference.grouped(*reference.quantize(weight.float(), bits), bits) for weight in weights]
        return by_integers(quantized), by_torch(weights)
    ours = [partial(native.linear, weight=native.packed(each), outputs=outputs, bias=None) for each in weights]
    return in_turn(ours), by_torch(weights)


def count_of(inputs: int, outputs: int) -> int:
    """Return how many weights of this shape take turns."""
    return min(max(2, WEIGHT_BYTES // (inputs * outputs * 2)), 24)


def random_weights(form: WeightForm, inputs: int, outputs: int, count: int) -> list[Groups]:
    """Return weights with random codes, scales and minima."""
    generator = torch.Generator().manual_seed(0)
    return [integers.random_groups(form, outputs, inputs, generator) for _ in range(count)]


def by_integers(weights: Sequence[Groups], compute: Callable[..., Tensor] = integers.linear) -> Form:
    """Return native code's products with the weights in turn. compute: of this or another module with its arguments."""
    packed = [(integers.packed(each), each) for each in weights]
    return in_turn([partial(compute, data=data, form=of.form, outputs=of.outputs, bias=None) for data, of in packed])


def by_torch(weights: Sequence[Tensor]) -> Form:
    """Return torch's products with the weights in turn."""
    packed = [cpu.packed(weight) if cpu.takes(weight) else weight for weight in weights]
    return in_turn([partial(cpu.linear, weight=each, bias=None) for each in packed])


def forms_compressed(weights: Sequence[Tensor], shape: tuple[int, int]) -> tuple[Form, Form]:
    """Return native code's products of x with compressed weights, and with the same weights in bfloat16.

    Both forms of each weight are allocated in turn: memory that is allocated first may be slower by a tenth.
    """
    ours, theirs = list[Form](), list[Form]()
    for weight in weights:
        data = compressed.compressed(weight)
        assert data is not None, "random weights of this size cannot be compressed"
        ours.append(partial(compressed.linear, data=data, shape=shape, bias=None))
        theirs.append(partial(native.linear, weight=native.packed(weight), outputs=shape[0], bias=None))
    return in_turn(ours), in_turn(theirs)


def in_turn(products: Sequence[Callable[[Tensor], Tensor]]) -> Form:
    """Return a function that calls the next of the products each time."""
    calls = 0

    def run(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return products[calls % len(products)](x)

    return run


def alternate(first: Callable[[], Tensor], second: Callable[[], Tensor], rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of both in each round, without the first round."""
    return [(seconds(first), seconds(second)) for _ in range(rounds + 1)][1:]


def seconds(compute: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    compute()
    return time.perf_counter() - began


def show(kind: str, rows: int, inputs: int, outputs: int, pairs: Sequence[tuple[float, ...]], note: str = "") -> None:
    """Print the medians of both sides, and the ratio with its quartiles. pairs: seconds of both in each round."""
    name, gigaflops = f"{kind:<13}{inputs:>5} to {outputs:<6}{rows:>5} rows", 2e-9 * rows * inputs * outputs
    own, other = (gigaflops / statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([theirs / ours for ours, theirs in pairs], n=4)
    print(f"{name}{own:>9.0f}{other:>9.0f}{middle:>8.2f}  {low:.2f} to {high:.2f}{note}", flush=True)
