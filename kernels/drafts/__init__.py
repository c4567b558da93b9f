"""Drafts of decoding rows: tokens that a step verifies, without storing their states."""

from baton.kernels.drafts.feed import MOST_DRAFTS, Drafts, check_ring

__all__ = ["MOST_DRAFTS", "Drafts", "check_ring"]
