"""Incremental parsers for a model's output, which may hold reasoning and tool calls; one file per format."""
