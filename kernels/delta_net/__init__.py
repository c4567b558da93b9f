"""Gated delta nets and Kimi Delta Attention: their decode and prefill steps, and their recurrences (rule)."""
