"""A kernel that does almost nothing: it shows whether Triton can compile and launch kernels on this machine."""

import torch
from triton import language as tl

from baton.kernels.runtime.triton.configs import KernelConfig
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.launching import launch

WRITTEN = 7


@jit
def _write(number_ptr, value):
    tl.store(number_ptr, value)


def probe(device: torch.device) -> None:
    """Launch the kernel and wait for it. Raises what Triton raises, or RuntimeError if the kernel computes nothing."""
    number = torch.zeros(1, dtype=torch.int32, device=device)
    launch(_write, (1,), number, WRITTEN, config=KernelConfig({}, warps=1))
    if number.item() != WRITTEN:
        raise RuntimeError("a kernel that Triton has launched did not run")
