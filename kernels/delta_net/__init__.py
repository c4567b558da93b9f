"""Gated delta nets and Kimi Delta Attention: their decode and prefill steps, and the recurrences in them."""
