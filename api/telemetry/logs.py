"""Structured logs on standard error: one event per line, as JSON or for the console."""

import json
import logging
import sys
from io import StringIO
from typing import Any, Literal, TextIO

import msgspec
import structlog
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestPayloadError

from baton.api.terminal.console import printable

Format = Literal["auto", "json", "console"]


def configure(format: Format, level: str) -> None:
    """Set up structlog and the standard library's logging. Call this once, when the process starts."""
    as_json = format == "json" or (format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering(as_json)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(max(logging.INFO, root.level))
    logging.getLogger("aiohttp.server").addFilter(is_not_bad_http)


def is_not_bad_http(record: logging.LogRecord) -> bool:
    """Return False for errors of malformed requests and bodies, with which any client could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage | RequestPayloadError))


def rendering(as_json: bool) -> list[structlog.typing.Processor]:
    """Return the structlog processors that turn an event into a line."""
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=to_json)]
    return [clean, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=write_traceback)]


def clean(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace control characters: clients, peers and checkpoints choose some of the texts in a log."""
    return {printable(name): printable(value) if isinstance(value, str) else value for name, value in event.items()}


def write_traceback(file: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a plain traceback: structlog's default shows values of variables, which include API keys and prompts."""
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    file.write(printable(text.getvalue()))


def to_json(event: Any, **_: Any) -> str:
    """Encode an event as JSON. Values without a JSON form are encoded as their repr."""
    try:
        return msgspec.json.encode(event, enc_hook=repr).decode()
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        return json.dumps(event, default=repr)
