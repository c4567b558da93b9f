"""Mixture of experts: routing, the routed experts, and the shared expert."""
