"""Kimi Delta Attention's recurrence: packed segments in chunks, and one token a row."""

from baton.kernels.delta_net.kda import reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["kda_scan", "kda_update"]

kda_scan = dispatch(reference.kda_scan, triton="baton.kernels.delta_net.kda.triton")
kda_update = dispatch(reference.kda_update, triton="baton.kernels.delta_net.kda.triton_update")
