"""The client of scripts/evaluate, and its table of results."""
