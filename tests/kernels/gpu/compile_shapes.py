"""A program that compiles the kernels that the cases of shapes/ launch, and writes the resources they need as JSON."""

import argparse
import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import triton
from triton.runtime import JITFunction

from baton import kernels
from baton.kernels.runtime.triton import KernelConfig, Launch, chosen, watched
from baton.kernels.runtime.triton.configs import table_of
from baton.kernels.runtime.triton.limits import assumed
from tests.kernels.gpu import shapes
from tests.kernels.gpu.compiling import KIB, SHARED, Variant, Work, compiled, name_of, variant_of

# Targets by a part of the GPU's name. If several parts match, the last one counts.
GPUS = {
    "A10": "86",
    "A100": "80",
    "A40": "86",
    "A6000": "86",
    "RTX 30": "86",
    "L4": "89",
    "RTX 40": "89",
    "6000 Ada": "89",
    "GH200": "90",
    "H100": "90",
    "H200": "90",
    "B200": "100",
    "RTX 50": "120",
    "Blackwell": "120",
    "MI300": "gfx942",
}


def main() -> None:
    """Print a JSON object with the results.

    triton: its version.
    taken: resources of each compiled kernel, see compiling.Usage.
    excess: resources that a kernel needs and its GPU does not have.
    unused: kernels that no case launches.
    unmet: entries of --table whose kernel and shape no case launches.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", choices=list(SHARED), default=list(SHARED))
    parser.add_argument("--cases", default="", metavar="REGEX", help="compile only cases whose names match")
    parser.add_argument(
        "--widest", action="store_true", help="compile only the widest variant of each kernel that has bfloat16"
    )
    parser.add_argument("--table", type=Path, help="compile the configurations of a file like configs.json instead")
    options = parser.parse_args()
    work, unmet = list[Work](), list[str]()
    if options.table:
        for gpu, table in tables(options.table).items():
            used, variants = configured(table, target_of(gpu))
            unmet += [f"{gpu}: {kernel}: {shape}" for kernel, shape in table.keys() - used]
            work += [(variant, case, target_of(gpu)) for variant, case in variants.items()]
    else:
        for target in options.targets:
            variants = {variant_of(launch): case for case, launch in launches(options.cases, target)}
            selected = widest(variants) if options.widest else variants
            work += [(variant, case, target) for variant, case in selected.items()]
    usages = list(compiled(work, processes()))
    excess = [fault for usage in usages for fault in usage.excess()]
    results = {"taken": [*map(asdict, usages)], "excess": excess, "unused": unused(), "unmet": unmet}
    print(json.dumps({"triton": triton.__version__, **results}))


def processes() -> int:
    """Return how many processes compile at a time."""
    return max(2, (os.cpu_count() or 2) // 2)


def launches(pattern: str = "", target: str = "89") -> Iterator[tuple[str, Launch]]:
    """Yield the launches on a target of the cases whose names match, each with its case's name.

    A GPU's shared memory decides on some configurations, so that an H100 runs other variants than an RTX 4090.
    """
    for name, case in cases():
        if re.search(pattern, name):
            found = list[Launch]()
            with watched(found.append), assumed(SHARED[target] * KIB):
                case()
            yield from ((name, launch) for launch in found)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all cases of shapes/ with their names, "module: case"."""
    for module in sorted(pkgutil.iter_modules(shapes.__path__), key=lambda module: module.name):
        for name, case in getattr(importlib.import_module(f"{shapes.__name__}.{module.name}"), "CASES", []):
            yield f"{module.name}: {name}", case


def widest(variants: dict[Variant, str]) -> dict[Variant, str]:
    """Return the variant with the largest tile for each kernel, with bfloat16 if the kernel takes that."""
    best = dict[str, Variant]()
    for variant in variants:
        before = best.get(variant.name)
        if before is None or (variant.has_bfloat16, variant.tile) > (before.has_bfloat16, before.tile):
            best[variant.name] = variant
    return {variant: variants[variant] for variant in best.values()}


def unused() -> list[str]:
    """Return the kernels of this repository that are neither launched by a case nor called by a launched kernel."""
    reached, open_ones = set[str](), [launch.kernel for _, launch in launches()]
    while open_ones:
        kernel = open_ones.pop()
        if name_of(kernel) not in reached:
            reached.add(name_of(kernel))
            called = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
            open_ones += [each for each in called if isinstance(each, JITFunction)]
    return sorted(all_kernels() - reached)


def all_kernels() -> set[str]:
    """Return the names of the kernels in all files kernels/**/triton*.py."""
    folder = Path(kernels.__path__[0])
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("triton*.py")]
    modules = [importlib.import_module(f"baton.kernels.{'.'.join(file.parts)}") for file in files]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return {name_of(kernel) for kernel in found if kernel.fn.__module__.startswith("baton.kernels.")}


Table = dict[tuple[str, str], KernelConfig]


def tables(file: Path) -> dict[str, Table]:
    """Read a file like configs.json: the configurations of each GPU."""
    found = dict[str, Table]()
    for (gpu, kernel, shape), config in table_of(file.read_text("utf-8")).items():
        found.setdefault(gpu, {})[kernel, shape] = config
    return found


def target_of(gpu: str) -> str:
    """Return the target of a GPU by its name. Raise SystemExit if it is unknown."""
    found = [target for part, target in GPUS.items() if part in gpu]
    if not found:
        raise SystemExit(f"for which target is {gpu!r}? GPUS has no part of its name")
    return found[-1]


def configured(table: Table, target: str) -> tuple[set[tuple[str, str]], dict[Variant, str]]:
    """Return the entries of a target's table that cases launch, and the variants that are compiled for them."""
    met, variants = set[tuple[str, str]](), dict[Variant, str]()

    def choose(kernel: str, shape: str, candidates: tuple[KernelConfig, ...]) -> KernelConfig:
        met.update({(kernel, shape)} & table.keys())
        return table.get((kernel, shape), candidates[0])

    with chosen(choose):
        for case, launch in launches(target=target):
            if any(launch.config is config for config in table.values()):
                variants[variant_of(launch)] = case
    return met, variants


if __name__ == "__main__":
    main()
