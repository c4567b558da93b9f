"""RMS norms: of the residual stream, and gated."""
