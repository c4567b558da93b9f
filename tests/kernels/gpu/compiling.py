"""Kernels compiled for GPUs that are not here, and what they take of one. Not for a process that interprets them."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from baton.kernels.runtime.triton import KernelConfig, Launch

KIB = 1024
SHARED = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99, "gfx942": 64}
"""KiB of shared memory that a program may have, by target: a compute capability, or AMD's name."""
# Bytes a thread: so little lies outside loops, where ptxas would rather keep registers free.
SPILLED = 32
# In float32 products take no tensor cores, and so more registers than there are, whatever the blocks: right, but slow.
SPILLED_IN_FLOAT32 = {
    "mamba2.ssd.triton._scan": 4096,
    "delta_net.rule.triton_by_head._prepare": 1024,
    "delta_net.rule.triton_by_head._scan": 4096,
    "delta_net.rule.triton_by_channel._relate": 512,
    "delta_net.rule.triton_by_channel._scan": 4096,
    "moe.experts.triton._project_in": 512,
}
# At widths that no model has: loads of single numbers want an address each.
SPILLED_WHERE_ODD = 256


@dataclass(frozen=True)
class Variant:
    """What Triton compiles once. types: of the arguments that are no constants, by name."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return name_of(self.kernel)

    @property
    def has_bfloat16(self) -> bool:
        return "*bf16" in dict(self.types).values()

    @property
    def tile(self) -> int:
        """How many elements a program has at a time, more or less: by this variants of one kernel compare."""
        return prod(value for name, value in self.constants if "BLOCK" in name)


@dataclass(frozen=True)
class Taken:
    """registers: of a thread; local: bytes of memory for what did not fit into them; shared: bytes of a program.

    is_float32: no argument is of bfloat16.
    """

    kernel: str
    case: str
    target: str
    registers: int
    local: int
    shared: int
    is_float32: bool

    def excess(self) -> list[str]:
        """What a GPU does not have, or has only slowly."""
        told = []
        if self.local > self._tolerated():
            told.append(f"{self.local} bytes of registers spilled")
        if self.shared > SHARED[self.target] * KIB:
            told.append(f"{self.shared} bytes of shared memory")
        return [f"{self.kernel} on {self.target} ({self.case}): {what}" for what in told]

    def _tolerated(self) -> int:
        least = SPILLED_WHERE_ODD if "odd" in self.case else SPILLED
        return max(least, SPILLED_IN_FLOAT32.get(self.kernel, 0)) if self.is_float32 else least


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('baton.kernels.')}.{kernel.fn.__name__}"


def variant_of(launch: Launch) -> Variant:
    types, constants = dict[str, str](), {**launch.constants, **launch.config.blocks}
    for name, argument in zip(launch.kernel.arg_names, launch.arguments, strict=False):
        if argument is None:
            constants[name] = None
        else:
            types[name] = type_of(argument)
    ordered = tuple(sorted(constants.items()))
    return Variant(launch.kernel, tuple(types.items()), ordered, launch.config.warps, launch.config.stages)


def type_of(argument: Any) -> str:
    """As Triton takes it in a launch."""
    if isinstance(argument, torch.Tensor):
        return f"*{canonicalize_dtype(argument.dtype)}"
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def compiled(variants: dict[Variant, str], targets: Iterable[str], processes: int) -> Iterator[Taken]:
    """What each takes on each of them, the largest first. variants: the case of each."""
    _wanted[:] = sorted(variants.items(), key=lambda item: -item[0].tile)
    work = [(index, target) for index in range(len(_wanted)) for target in targets]
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        yield from pool.map(_taken, *zip(*work, strict=True))


# Kernels cannot be sent to other processes, which have them from their birth instead.
_wanted: list[tuple[Variant, str]] = []


def _taken(index: int, target: str) -> Taken:
    variant, case = _wanted[index]
    return taken_by(variant, case, target)


def taken_by(variant: Variant, case: str, target: str) -> Taken:
    made = compile_for(variant, target)
    if target.isdigit():
        told = resources_of(made.asm["cubin"])
        registers, local = told["REG"], told["STACK"] + told["LOCAL"]
    else:
        assembly = made.asm["amdgcn"]
        registers = number_in(assembly, "vgpr_count")
        local = number_in(assembly, "private_segment_fixed_size") + 4 * number_in(assembly, "vgpr_spill_count")
    return Taken(variant.name, case, target, registers, local, made.metadata.shared, not variant.has_bfloat16)


def compile_for(variant: Variant, target: str) -> CompiledKernel:
    types, names = dict(variant.types), variant.kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    gpu = GPUTarget("cuda", int(target), 32) if target.isdigit() else GPUTarget("hip", target, 64)
    warps = KernelConfig({}, variant.warps).warps_of(gpu.warp_size)
    return triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": variant.stages})


def resources_of(cubin: bytes) -> dict[str, int]:
    """As cuobjdump tells them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}


def number_in(assembly: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", assembly)
    assert match, name
    return int(match[1])
