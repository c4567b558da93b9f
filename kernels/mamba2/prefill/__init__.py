"""The Mamba-2 mixer of a prefill: convolution, scan, gate and norm in one, where native code is installed."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_prefill
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.prefill import native, reference
from baton.kernels.mamba2.ssd import ssd_prefill
from baton.kernels.norm.gated import gated_norm
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime import triton as gpu

__all__ = ["mixer_prefill"]

TORCH = reference.Parts(conv1d_prefill, ssd_prefill, gated_norm)


def mixer_prefill(
    projected: Tensor, constants: MixerConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """See reference.mixer_prefill."""
    if gpu.takes(projected):
        from baton.kernels.mamba2.prefill import triton

        return triton.mixer_prefill(projected, constants, conv_pool, state_pool, plan)
    if native.takes(projected, conv_pool, state_pool):
        return native.mixer_prefill(projected, constants, conv_pool, state_pool, plan)
    return reference.mixer_prefill(projected, constants, conv_pool, state_pool, plan, TORCH)
