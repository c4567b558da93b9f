"""Instruction sets that native code is compiled for, and which of them this CPU supports."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.kernels.runtime.cpp.amx import may_use_tiles

V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V3_VNNI = V3 | {"avx_vnni"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
V4_VNNI = V4 | {"avx512_vnni"}
V4_BF16 = V4_VNNI | {"avx512_bf16"}
AMX = frozenset({"amx_tile", "amx_bf16"})
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set that native code can be compiled for."""

    name: str
    machine: str  # architecture, as `machine` returns it
    march: tuple[str, ...]  # flags of GCC and Clang
    zig: str  # Zig's name of the CPU
    needs: frozenset[str] = frozenset()  # CPU features, by Linux's names


# The best first. A library is named after its target, never "native", because machines may share a cache folder.
TARGETS = (
    Target(
        "x86-64-v4-amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
        "x86_64_v4+avx512bf16+avx512vnni+amx_tile+amx_bf16",
        V4_BF16 | AMX,
    ),
    Target(
        "x86-64-v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        "x86_64_v4+avx512bf16+avx512vnni",
        V4_BF16,
    ),
    Target("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni", V4_VNNI),
    Target("x86-64-v4", "x86_64", ("-march=x86-64-v4",), "x86_64_v4", V4),
    Target("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni", V3_VNNI),
    Target("x86-64-v3", "x86_64", ("-march=x86-64-v3",), "x86_64_v3", V3),
    Target("x86-64-v2", "x86_64", ("-march=x86-64-v2",), "x86_64_v2", V2),
    Target(
        "armv8.2-a-bf16",
        "aarch64",
        ("-march=armv8.2-a+fp16+bf16+dotprod",),
        "generic+v8_2a+fullfp16+bf16+dotprod",
        frozenset({"asimd", "asimdhp", "asimddp", "bf16"}),
    ),
    Target(
        "armv8.2-a",
        "aarch64",
        ("-march=armv8.2-a+fp16+dotprod",),
        "generic+v8_2a+fullfp16+dotprod",
        frozenset({"asimd", "asimdhp", "asimddp"}),
    ),
    Target("armv8-a", "aarch64", ("-march=armv8-a",), "generic"),
)


def machine() -> str:
    """Return this machine's architecture: x86_64, aarch64, or the system's name for another one."""
    name = platform.machine().lower()
    return MACHINES.get(name, name)


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features that all CPUs of this machine have, by Linux's names.

    Empty on other systems, where only the baseline of an architecture can be assumed.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*listed)) if listed else frozenset()


def usable_targets(machine: str, features: frozenset[str]) -> list[Target]:
    """Return the targets whose instructions this CPU supports, in the order of TARGETS."""
    return [target for target in TARGETS if target.machine == machine and target.needs <= features]


def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of an x86 CPU's vendor, such as "GenuineIntel"; "" if it cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def preferred(targets: list[Target], vendor: str) -> list[Target]:
    """Return the targets in another order if that is better for this vendor's CPUs.

    Intel's take two cycles for a product of pairs of bfloat16 (vdpbf16ps), and half a cycle for one of float32 numbers.
    So AVX-512 without BF16 multiplies twice as fast.
    """
    if vendor != "GenuineIntel":
        return targets
    slow = [target for target in targets if target.needs == V4_BF16]
    others = [target for target in targets if target not in slow]
    at = sum(target.needs >= V4 for target in others)
    return others[:at] + slow + others[at:]


def permitted(targets: list[Target], may_use_tiles: Callable[[], bool] = may_use_tiles) -> list[Target]:
    """Return the targets without those that need AMX, if the system does not let this process use it.

    may_use_tiles: asks the system for the permission; only called if a target needs AMX.
    """
    if not any(target.needs >= AMX for target in targets) or may_use_tiles():
        return targets
    return [target for target in targets if not target.needs >= AMX]


def chosen(targets: list[Target], environment: Mapping[str, str] = os.environ) -> list[Target]:
    """Return the targets from the one on that BATON_TARGET names, or all if it is not set.

    Raises ValueError if it names none of them.
    """
    name, names = environment.get("BATON_TARGET"), [target.name for target in targets]
    if not name:
        return targets
    if name not in names:
        raise ValueError(f"BATON_TARGET: expected {', '.join(names) or 'nothing'} on this CPU, not {name!r}")
    return targets[names.index(name) :]


def targets_here() -> list[Target]:
    """Return the targets that this process can run and may use, the best first. Raises ValueError as `chosen` does."""
    return chosen(permitted(preferred(usable_targets(machine(), cpu_features()), cpu_vendor())))
