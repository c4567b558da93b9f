"""Projections: with packed weights (dense), integer weights (quantized), and one weight per head (per_head)."""
