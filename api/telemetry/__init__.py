"""Metrics, logs, spans and trace files."""
