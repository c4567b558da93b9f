"""Launches of kernels that are compiled already, without Triton's own look-up, which takes several times as long.

Triton finds a compiled kernel after it has bound all arguments by name and specialized each of them. The key here holds
only what differs between the variants of this project's kernels: constants, block sizes, dtypes, and which arguments
are None. Numbers are never specialized (jit.py). Pointers are specialized for multiples of 16 bytes, which nearly all
of them are; where one is not, the key says which of them are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from baton.kernels.runtime.triton.configs import KernelConfig

ALIGNMENT = 16
"""Bytes. Triton compiles another variant for a pointer that is not a multiple of this."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled kernel that has been launched before, and what each launch of it passes to the driver."""

    kernel: Any  # the JITFunction; referenced so that no other kernel gets its id, which is part of the key
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # values of the parameters that follow the arguments
    stream_of: Callable[[int], int]  # returns the current stream of a device
    hooks: Any  # holds launch_enter_hook, which a profiler sets


_compiled: dict[tuple[Any, ...], _Compiled] = {}


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    config: KernelConfig,
) -> None:
    """Enqueue a kernel on the current stream. Compile it first, unless this variant has been launched before.

    arguments: pointers and numbers, in the kernel's order, before all constants.
    constants: the kernel's constexprs, other than config's blocks.
    """
    types, values, bits, tensor = list[Any](), list[Any](), 0, None
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensor, pointer = argument, argument.data_ptr()
            bits |= pointer
            values.append(pointer)
            types.append(argument.dtype)
        else:
            values.append(argument)
            types.append(_kind(argument))
    device = -1 if tensor is None else tensor.get_device()
    key = (id(kernel), device, config.key, *constants, *constants.values(), *types)
    if bits % ALIGNMENT:
        key += tuple(each.data_ptr() % ALIGNMENT == 0 for each in arguments if isinstance(each, Tensor))
    known = _compiled.get(key)
    if known is None or _reports(known.hooks):
        made = kernel[grid](*arguments, **constants, **config.blocks, **_options(config))
        if known is None:
            _remember(key, kernel, made, len(arguments), {**constants, **config.blocks})
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = known.stream_of(device)
    known.run(x, y, z, stream, known.function, known.metadata, None, None, None, *values, *known.constants)


def _kind(argument: Any) -> Any:
    """Return what Triton compiles a variant for, of an argument that is not a tensor."""
    return -(2**31) <= argument < 2**31 if type(argument) is int else type(argument)


def _reports(hooks: Any) -> bool:
    """Return whether Triton must report launches to a profiler. Its hook is a chain of calls, None or a function."""
    hook = hooks.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _remember(key: tuple[Any, ...], kernel: Any, made: Any, arguments: int, constants: Mapping[str, Any]) -> None:
    """Store what Triton has compiled, unless it has interpreted the kernel or will compile it later.

    Kernels for AMD's GPUs are not stored, because Triton also specializes them for the size of each tensor's storage.
    """
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    if isinstance(made, CompiledKernel) and made.metadata.target.backend == "cuda":
        rest = tuple(constants[name] for name in kernel.arg_names[arguments:])
        stream_of = driver.active.get_current_stream
        _compiled[key] = _Compiled(
            kernel, made.run, made.function, made.packed_metadata, rest, stream_of, knobs.runtime
        )


def _options(config: KernelConfig) -> dict[str, int]:
    """Return a configuration's number of warps and stages as options of Triton."""
    return {"num_warps": config.warps_of(_threads_a_warp()), "num_stages": config.stages}


@cache
def _threads_a_warp() -> int:
    """Return the threads per warp; all GPUs of a process are assumed to be alike."""
    return 32 if torch.version.hip is None else int(torch.cuda.get_device_properties().warp_size)
