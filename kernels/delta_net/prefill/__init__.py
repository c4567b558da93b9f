"""The gated delta net of a prefill: convolution, scan, norm and gate in one, where native code is installed."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_prefill
from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.gated import gated_delta_prefill
from baton.kernels.delta_net.prefill import native, reference
from baton.kernels.norm.gated import gated_norm
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime import triton as gpu

__all__ = ["delta_prefill"]

TORCH = reference.DeltaParts(conv1d_prefill, gated_delta_prefill, gated_norm)


def delta_prefill(
    projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """See reference.delta_prefill."""
    if gpu.takes(projected):
        from baton.kernels.delta_net.prefill import triton

        return triton.delta_prefill(projected, constants, conv_pool, state_pool, plan)
    if native.takes(projected, conv_pool, state_pool):
        return native.delta_prefill(projected, constants, conv_pool, state_pool, plan)
    return reference.delta_prefill(projected, constants, conv_pool, state_pool, plan, TORCH)
