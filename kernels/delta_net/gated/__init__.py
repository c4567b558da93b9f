"""The gated delta rule: packed segments in chunks, and one token a row."""

from baton.kernels.delta_net.gated import reference
from baton.kernels.delta_net.gated.reference import unit_length
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["gated_delta_prefill", "gated_delta_update", "unit_length"]

gated_delta_prefill = dispatch(reference.gated_delta_prefill, triton="baton.kernels.delta_net.gated.triton")
gated_delta_update = dispatch(reference.gated_delta_update, triton="baton.kernels.delta_net.gated.triton_update")
