"""Whether spans are exported, which is up to --otel and the usual variables of the environment."""

import os
from collections.abc import Mapping
from typing import Protocol

import structlog

from baton.api.config import Config, ConfigError
from baton.api.generation.outputs import Generation

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
INSTALL = "pip install 'baton-serve[otel]'"


class Spans(Protocol):
    """Where spans of requests go."""

    def record_end(self, generation: Generation, error: str | None) -> None: ...

    def close(self) -> None: ...


def open_spans(config: Config, model: str, environment: Mapping[str, str] = os.environ) -> Spans | None:
    """None if nobody asks for them. Raises ConfigError if --otel does and OpenTelemetry is not installed.

    A variable alone may be meant for other programs: then it is a warning.
    """
    asked = config.otel or any(environment.get(name) for name in ENDPOINTS)
    if not asked or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from baton.api.telemetry.otel import export_spans
    except ImportError as missing:
        if config.otel:
            raise ConfigError(f"--otel: {missing}; {INSTALL}") from None
        structlog.get_logger().warning("spans are not exported", missing=str(missing), install=INSTALL)
        return None
    return export_spans(model)
