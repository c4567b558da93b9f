"""The gated delta rule: over packed segments in chunks, and for one token of each row."""

from baton.kernels.delta_net.rule import reference
from baton.kernels.delta_net.rule.reference import unit_length
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["delta_scan", "delta_update", "unit_length"]

delta_scan = dispatch(reference.delta_scan, triton="baton.kernels.delta_net.rule.triton")
delta_update = dispatch(reference.delta_update, triton="baton.kernels.delta_net.rule.triton_update")
