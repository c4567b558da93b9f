"""Kimi Delta Attention's recurrence: packed segments in chunks, and one token a row."""

from kernels.kda.reference import gated_output, kda_scan, kda_update

__all__ = ["gated_output", "kda_scan", "kda_update"]
