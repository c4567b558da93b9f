"""Kimi Delta Attention of a prefill: convolution, scan, norm and gate."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_prefill
from baton.kernels.delta_net.kda import kda_scan
from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.delta_net.kda_prefill import native, reference
from baton.kernels.norm.gated import gated_norm
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime import triton as gpu

__all__ = ["kda_prefill"]

TORCH = reference.KdaParts(conv1d_prefill, kda_scan, gated_norm)


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """See reference.kda_prefill."""
    given = (projected, forget, gate, constants, conv_pool, state_pool, plan)
    if gpu.takes(projected):
        from baton.kernels.delta_net.kda_prefill import triton

        return triton.kda_prefill(*given)
    if native.takes(projected, forget, gate, conv_pool, state_pool):
        return native.kda_prefill(*given)
    return reference.kda_prefill(*given, TORCH)
