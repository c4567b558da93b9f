"""The gated delta rule: packed segments in chunks, and one token a row."""

from kernels.gated_delta.reference import gated_delta_prefill, gated_delta_update, unit_length

__all__ = ["gated_delta_prefill", "gated_delta_update", "unit_length"]
