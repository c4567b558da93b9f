"""RMS norms: of the residual stream (rms), and with a gate (gated)."""
