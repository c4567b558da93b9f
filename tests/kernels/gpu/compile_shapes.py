"""As a program: compiles what the cases of shapes/ launch, and writes what came of it as JSON. See main."""

import argparse
import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from triton.runtime import JITFunction

from baton import kernels
from baton.kernels.runtime.triton import KernelConfig, Launch, chosen, watched
from baton.kernels.runtime.triton.configs import table_of
from tests.kernels.gpu import shapes
from tests.kernels.gpu.compiling import SHARED, Taken, Variant, compiled, name_of, variant_of

# By what a GPU's name has in it.
GPUS = {
    "A100": "80",
    "A10": "86",
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
    """Writes `taken` and `excess`: see compiling.Taken; `unused`: kernels that no case needs; `unmet`: of the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", choices=list(SHARED), default=list(SHARED))
    parser.add_argument("--cases", default="", metavar="REGEX", help="of which cases")
    parser.add_argument(
        "--widest", action="store_true", help="of each kernel only the widest variant that has bfloat16"
    )
    parser.add_argument("--table", type=Path, help="like configs.json: what it configures instead, for its GPUs")
    options = parser.parse_args()
    taken, unmet = list[Taken](), list[str]()
    if options.table:
        for gpu, table in tables(options.table).items():
            used, variants = configured(table)
            unmet += [f"{gpu}: {kernel}: {shape}" for kernel, shape in table.keys() - used]
            taken += compiled(variants, [target_of(gpu)], processes())
    else:
        variants = {variant_of(launch): case for case, launch in launches(options.cases)}
        wanted = widest(variants) if options.widest else variants
        taken += compiled(wanted, options.targets, processes())
    excess = [told for each in taken for told in each.excess()]
    print(json.dumps({"taken": [*map(asdict, taken)], "excess": excess, "unused": unused(), "unmet": unmet}))


def processes() -> int:
    return max(2, (os.cpu_count() or 2) // 2)


def launches(pattern: str = "") -> Iterator[tuple[str, Launch]]:
    """All that the matching cases launch, by their names behind those of their files."""
    for name, case in cases():
        if re.search(pattern, name):
            found = list[Launch]()
            with watched(found.append):
                case()
            yield from ((name, launch) for launch in found)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for module in sorted(pkgutil.iter_modules(shapes.__path__), key=lambda module: module.name):
        for name, case in getattr(importlib.import_module(f"{shapes.__name__}.{module.name}"), "CASES", []):
            yield f"{module.name}: {name}", case


def widest(variants: dict[Variant, str]) -> dict[Variant, str]:
    """Of each kernel one, of bfloat16 where it takes that."""
    best = dict[str, Variant]()
    for variant in variants:
        before = best.get(variant.name)
        if before is None or (variant.has_bfloat16, variant.tile) > (before.has_bfloat16, before.tile):
            best[variant.name] = variant
    return {variant: variants[variant] for variant in best.values()}


def unused() -> list[str]:
    """Kernels of this repository that neither are launched by a case nor belong to one that is."""
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
    found = dict[str, Table]()
    for (gpu, kernel, shape), config in table_of(file.read_text("utf-8")).items():
        found.setdefault(gpu, {})[kernel, shape] = config
    return found


def target_of(gpu: str) -> str:
    """SystemExit if the name of a GPU says nothing."""
    found = [target for part, target in GPUS.items() if part in gpu]
    if not found:
        raise SystemExit(f"for which target is {gpu!r}? GPUS has no part of its name")
    return found[-1]


def configured(table: Table) -> tuple[set[tuple[str, str]], dict[Variant, str]]:
    """What of a table the cases meet, and the variants of those that do."""
    met, variants = set[tuple[str, str]](), dict[Variant, str]()

    def choose(kernel: str, shape: str, candidates: tuple[KernelConfig, ...]) -> KernelConfig:
        met.update({(kernel, shape)} & table.keys())
        return table.get((kernel, shape), candidates[0])

    with chosen(choose):
        for case, launch in launches():
            if any(launch.config is config for config in table.values()):
                variants[variant_of(launch)] = case
    return met, variants


if __name__ == "__main__":
    main()
