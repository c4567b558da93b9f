"""Attention over pages."""

from kernels.attention.reference import paged_attention, write_pages

__all__ = ["paged_attention", "write_pages"]
