"""The prefill step of the Mamba-2 mixer: convolution, scan, gate and norm; one call of native code."""

from torch import Tensor

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.prefill import native, reference
from baton.kernels.mamba2.ssd import ssd_prefill
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime.triton import takes

__all__ = ["mixer_prefill"]


def mixer_prefill(
    projected: Tensor, constants: MixerConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """Compute reference.mixer_prefill with the fastest form that takes the tensors."""
    arguments = (projected, constants, conv_pool, state_pool, plan)
    if takes(projected):
        from baton.kernels.mamba2.prefill import triton

        return triton.mixer_prefill(*arguments)
    if native.takes(projected, conv_pool, state_pool):
        return native.mixer_prefill(*arguments)
    return reference.mixer_prefill(*arguments, ssd_prefill)
