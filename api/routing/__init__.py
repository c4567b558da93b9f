"""The router: one address in front of several engines, which knows which states lie where."""
