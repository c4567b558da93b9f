"""The server under test, run in this process, so that bugs can be planted in it and its whole log is seen."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog
from structlog.testing import LogCapture

from baton.actors.requests import Request
from baton.api.config import Config
from baton.api.serve import Exit, Process
from baton.api.telemetry.logs import is_not_bad_http
from baton.api.wiring import bundled_model, load
from tests.api.hash_traffic import make_checkpoint
from tests.fuzz.ranges import watching, wrong_numbers
from tests.fuzz.shapes import BUNDLED_VOCAB, VOCAB
from tests.models.oracle import TEMPLATE

MAX_MODEL_LEN = 192
MAX_RUNNING, MAX_QUEUE = 8, 24
SESSION_CAP = 12
REQUEST_TIMEOUT_S = 20.0
START_S = STOP_S = 60.0
PATIENCE_S = 30.0
SMALL: dict[str, Any] = {
    "tool_parser": "hermes",
    "pooling": "mean",
    "port": 0,
    "state_slots": 20,
    "kv_pages": 256,
    "page_size": 8,
    "max_running": MAX_RUNNING,
    "max_queue": MAX_QUEUE,
    "step_tokens": 64,
    "track_interval": 16,
    "max_model_len": MAX_MODEL_LEN,
    "session_cap": SESSION_CAP,
    "request_timeout": REQUEST_TIMEOUT_S,
    "host_memory": 2**20,
    "codec_check": True,
    "poison_freed": True,
    "served_model_name": "fuzz",
}


class Records(logging.Handler):
    """A log handler that collects the warnings and errors of libraries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(is_not_bad_http)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(
            f"{record.name}: {record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage()
        )


@dataclass
class RunningServer:
    """A server under test, and what it has logged."""

    vocab: int  # the size of the model's vocabulary
    task: "asyncio.Task[Exit]"
    log: LogCapture
    records: Records
    host: str = ""  # the address that the server listens on
    port: int = 0
    wrong_numbers: list[str] = field(default_factory=list)  # fields out of range in requests that reached the device
    http: aiohttp.ClientSession = field(init=False)

    def logged(self, event: str) -> dict[str, Any] | None:
        """Return the first log line of this event, or None."""
        return next((dict(line) for line in self.log.entries if line["event"] == event), None)

    async def wait_ready(self) -> None:
        """Wait until the server is ready. Raises the error that ended the server before that."""
        async with asyncio.timeout(START_S):
            while self.logged("ready") is None:
                await asyncio.wait([self.task], timeout=0.01)
                if self.task.done():
                    raise RuntimeError(f"it ended with {self.task.result()}: {self.troubles()}")

    def troubles(self) -> list[str]:
        """Return the log lines that no client should be able to cause."""
        bad = [line for line in self.log.entries if line["log_level"] in ("error", "critical") or "exc_info" in line]
        return [*map(str, bad), *self.records.lines]

    def note(self, request: Request) -> None:
        """Record which numbers of a request are out of range. Runs on the device's thread."""
        names = wrong_numbers(request, self.vocab, MAX_MODEL_LEN)
        self.wrong_numbers += [f"{name} of {request}"[:500] for name in names]

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            return await response.json()

    async def post(self, path: str, body: Any) -> Any:
        async with self.http.post(path, json=body) as response:
            return await response.json()


def make_hash_model(folder: Path) -> Path:
    """Write a checkpoint of the hash model, whose output can be computed from the prompt."""
    (folder / "chat_template.jinja").write_text("{{ tools[0].function.name if tools }}" + TEMPLATE)
    return make_checkpoint(folder, vocab_size=VOCAB, eos_token_id=VOCAB - 1)


class PretendedSignals:
    """Signals that reach one server of this process, whose own handling of signals stays as it is."""

    def deliver_to(self, receive: Callable[[int], None]) -> None:
        self.send = receive


@asynccontextmanager
async def serving(folder: Path | None, **options: Any) -> AsyncIterator[RunningServer]:
    """Run the real server with the hash model in `folder`, or with the bundled model, and drain it at the end."""
    config = Config(model=str(folder or bundled_model()), **SMALL | options)
    with capturing() as (log, records):
        vocab, signals = VOCAB if folder is not None else BUNDLED_VOCAB, PretendedSignals()
        server = RunningServer(vocab, asyncio.ensure_future(Process(config, load, signals).run()), log, records)
        await server.wait_ready()
        url = urlsplit(server.logged("listening")["url"])  # type: ignore[index]
        server.host, server.port = str(url.hostname), int(url.port or 0)
        async with aiohttp.ClientSession(url.geturl(), timeout=aiohttp.ClientTimeout(PATIENCE_S)) as server.http:
            try:
                with watching(server.note):
                    yield server
            finally:
                if not server.task.done():
                    signals.send(signal.SIGTERM)
                await asyncio.wait([server.task], timeout=STOP_S)


@contextmanager
def capturing() -> Iterator[tuple[LogCapture, Records]]:
    """Capture everything that is logged while the block runs."""
    log, records, before = LogCapture(), Records(), structlog.get_config()
    structlog.configure(
        processors=[log],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(records)
    try:
        yield log, records
    finally:
        logging.getLogger().removeHandler(records)
        structlog.configure(**before)
