"""Compilation of kernels for GPUs that this machine lacks, and the resources that they need.

The module does not work in a process that interprets kernels.
"""

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
"""KiB of shared memory that a program may use, by target: a compute capability, or AMD's name of an architecture."""
# Spilled registers that are tolerated, in bytes per thread. ptxas spills a few outside of loops, to free registers.
SPILLED = 32
# Spilled bytes that are tolerated in float32: without tensor cores these kernels need more registers than a GPU has,
# with any block sizes. They are correct, but slow.
SPILLED_IN_FLOAT32 = {
    "mamba2.ssd.triton._scan": 4096,
    "delta_net.rule.triton_by_head._prepare": 1024,
    "delta_net.rule.triton_by_head._scan": 4096,
    "delta_net.rule.triton_by_channel._relate": 512,
    "delta_net.rule.triton_by_channel._scan": 4096,
    "moe.experts.triton._project_in": 512,
}
# Spilled bytes that are tolerated at odd widths, which no model has: each number has its own load and address.
SPILLED_WHERE_ODD = 256


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that distinguishes its compiled variants."""

    kernel: Any
    types: tuple[tuple[str, str], ...]  # name and type of each argument that is not a constant
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """The kernel's module and function."""
        return name_of(self.kernel)

    @property
    def has_bfloat16(self) -> bool:
        """Whether an argument is a bfloat16 tensor."""
        return "*bf16" in dict(self.types).values()

    @property
    def tile(self) -> int:
        """Roughly the number of elements that a program holds at a time; used to compare variants of one kernel."""
        return prod(value for name, value in self.constants if "BLOCK" in name)


@dataclass(frozen=True)
class Usage:
    """The resources that a compiled kernel needs."""

    kernel: str
    case: str
    target: str
    registers: int  # per thread
    local: int  # bytes per thread of registers that were spilled to memory
    shared: int  # bytes of shared memory per program
    is_float32: bool  # no argument is bfloat16

    def excess(self) -> list[str]:
        """Return a message for each resource that the GPU lacks, and one if spilled registers make the kernel slow."""
        faults = []
        if self.local > self._tolerated():
            faults.append(f"{self.local} bytes of registers spilled")
        if self.shared > SHARED[self.target] * KIB:
            faults.append(f"{self.shared} bytes of shared memory")
        return [f"{self.kernel} on {self.target} ({self.case}): {fault}" for fault in faults]

    def _tolerated(self) -> int:
        """Return how many bytes per thread may be spilled."""
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
    """Return the type that Triton gives an argument in a launch."""
    if isinstance(argument, torch.Tensor):
        return f"*{canonicalize_dtype(argument.dtype)}"
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


# A variant, the name of a case that launches it, and a target for which it is compiled.
Work = tuple[Variant, str, str]


def compiled(work: Iterable[Work], processes: int) -> Iterator[Usage]:
    """Compile variants, the largest tile first, and yield the resources that each of them needs."""
    _work[:] = sorted(work, key=lambda item: -item[0].tile)
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        yield from pool.map(_usage, range(len(_work)))


# Kernels cannot be pickled. Worker processes inherit this list when they are forked.
_work: list[Work] = []


def _usage(index: int) -> Usage:
    return usage_of(*_work[index])


def usage_of(variant: Variant, case: str, target: str) -> Usage:
    """Compile a variant for a target, and return what it needs."""
    made = compile_for(variant, target)
    if target.isdigit():
        resources = resources_of(made.asm["cubin"])
        registers, local = resources["REG"], resources["STACK"] + resources["LOCAL"]
    else:
        assembly = made.asm["amdgcn"]
        registers = number_in(assembly, "vgpr_count")
        local = number_in(assembly, "private_segment_fixed_size") + 4 * number_in(assembly, "vgpr_spill_count")
    return Usage(variant.name, case, target, registers, local, made.metadata.shared, not variant.has_bfloat16)


def compile_for(variant: Variant, target: str) -> CompiledKernel:
    types, names = dict(variant.types), variant.kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    gpu = GPUTarget("cuda", int(target), 32) if target.isdigit() else GPUTarget("hip", target, 64)
    warps = KernelConfig({}, variant.warps).warps_of(gpu.warp_size)
    return triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": variant.stages})


def resources_of(cubin: bytes) -> dict[str, int]:
    """Return the registers and bytes of memory per thread that cuobjdump reports."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}


def number_in(assembly: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", assembly)
    assert match, name
    return int(match[1])
