"""The scan of Mamba-2's recurrence over packed prompts, with initial states and with checkpoints at exact positions."""

from baton.kernels.mamba2.ssd import cpu, reference
from baton.kernels.runtime.dispatch import dispatch, on_cpu

__all__ = ["ssd_prefill"]

ssd_prefill = dispatch(reference.ssd_prefill, (on_cpu, cpu.ssd_prefill))
