"""The decision whether spans are exported, from --otel and the usual OpenTelemetry environment variables."""

import os
from collections.abc import Mapping
from typing import Protocol

import structlog

from baton.api.config import Config, ConfigError
from baton.api.generation.outputs import Generation

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
INSTALL = "pip install 'baton-serve[otel]'"


class Spans(Protocol):
    """The interface of an exporter of spans."""

    def record_end(self, generation: Generation, error: str | None) -> None: ...

    def close(self) -> None: ...


def open_spans(config: Config, model: str, environment: Mapping[str, str] = os.environ) -> Spans | None:
    """Return the exporter of spans, or None if neither --otel nor an environment variable asks for spans.

    Raises ConfigError if --otel is set and OpenTelemetry is not installed. If only a variable is set, which may be
    meant for other programs, log a warning instead.
    """
    enabled = config.otel or any(environment.get(name) for name in ENDPOINTS)
    if not enabled or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from baton.api.telemetry.otel import export_spans
    except ImportError as missing:
        if config.otel:
            raise ConfigError(f"--otel: {missing}; {INSTALL}") from None
        structlog.get_logger().warning("spans are not exported", missing=str(missing), install=INSTALL)
        return None
    return export_spans(model)
