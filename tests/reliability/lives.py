"""A server with small limits that is killed and started again on the same folder, while its size is recorded."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import aiohttp

from tests.api.hash_traffic import troubles
from tests.api.server_process import SERVE, ServerProcess
from tests.fuzz.oracles import WHOLE_COUNTERS
from tests.fuzz.server import MAX_MODEL_LEN
from tests.reliability.figures import Figures, Size

TENANTS = ("first", "second")
HOSTILE, OPERATOR = "hostile", "operator"
KEYS = (*TENANTS, HOSTILE, OPERATOR)
SLOTS, PAGES = 64, 1024
SESSION_CAP = 24
HEADERS_S, BODY_S, IDLE_S, UNREAD_S, WEBSOCKET_S = 1.5, 2.0, 2.5, 2.0, 3.0
MAX_CONNECTIONS = 80
OPTIONS = {
    "state-slots": SLOTS,
    "kv-pages": PAGES,
    "page-size": 8,
    "max-running": 16,
    "max-queue": 256,
    "step-tokens": 256,
    "track-interval": 16,
    "max-model-len": MAX_MODEL_LEN,
    "session-cap": SESSION_CAP,
    "session-disk": "2M",
    "host-memory": "1M",
    "response-memory": "1M",
    "bytes-in-flight": "8M",
    "body-limit": "1M",
    "max-connections": MAX_CONNECTIONS,
    "header-timeout": HEADERS_S,
    "body-timeout": BODY_S,
    "idle-timeout": IDLE_S,
    "unread-timeout": UNREAD_S,
    "websocket-timeout": WEBSOCKET_S,
    "ping-interval": 1.0,
    "served-model-name": "fuzz",
}
WATCH_S = 0.5
PATIENCE_S = 60.0
ENDED = re.compile(r'^baton:connections_ended_total\{[^}]*why="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


class Lives:
    """The successive lives of a server: a life lasts from a start to a kill. Clients wait while the server is down."""

    def __init__(self, model: Path, folder: Path, figures: Figures) -> None:
        self.number = 0  # how often the server has been started
        self.figures = figures
        self.url_file = folder / "url"  # holds the server's URL, for clients in other processes
        self.url = ""
        self.down: list[tuple[float, float]] = []  # (begin, end) of each time without a server
        options = [text for name, value in OPTIONS.items() for text in (f"--{name}", str(value))]
        keys = [text for key in KEYS for text in ("--api-key", key)]
        self._arguments = [*SERVE, str(model), *options, *keys, "--session-dir", str(folder / "sessions")]
        self._server: ServerProcess | None = None
        self._up = asyncio.Event()
        self._started = 0.0

    async def start(self) -> None:
        """Start the server, and let waiting clients continue with its new URL."""
        self._server = ServerProcess(self._arguments, key=OPERATOR)
        await asyncio.to_thread(self._server.__enter__)
        self.number += 1
        self.url = self._server.url
        self.url_file.with_suffix(".tmp").write_text(self.url)
        self.url_file.with_suffix(".tmp").replace(self.url_file)
        self._started = time.monotonic()
        if self.down:
            self.down[-1] = (self.down[-1][0], self._started)
        self._up.set()

    async def kill(self) -> None:
        """Kill the server with SIGKILL, and start it again."""
        assert self._server is not None
        self._read_log()
        await asyncio.to_thread(self.count_ended)
        self._up.clear()
        self.down.append((time.monotonic(), float("inf")))
        self._server.process.kill()
        await asyncio.to_thread(self._server.kill)
        self.figures.done["kills"] += 1
        await self.start()

    async def end(self) -> None:
        """Stop the server with SIGTERM, and check that it exits cleanly."""
        assert self._server is not None
        await asyncio.to_thread(self.count_ended)
        await asyncio.to_thread(self._server.__exit__, None)
        self._read_log()

    async def current(self) -> int:
        """Wait until the server is up, and return the number of its life."""
        await self._up.wait()
        return self.number

    def is_over(self, number: int) -> bool:
        """Return whether life `number` has ended."""
        return number != self.number or not self._up.is_set()

    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    @property
    def server(self) -> ServerProcess:
        assert self._server is not None
        return self._server

    async def watch(self) -> None:
        """Record sizes, and check the server's own reports, until cancelled.

        Raises AssertionError at the first complaint.
        """
        async with Caller(self, OPERATOR, "operator") as operator:
            while True:
                life = await self.current()
                self._note_size()
                answer = await operator.ask("GET", "/server_info")
                if answer is not None and answer[0] == 200:
                    self._check(answer[1], life)
                self._read_log()
                assert self.figures.wrong == [], "\n\n".join(self.figures.wrong)
                await asyncio.sleep(WATCH_S)

    async def descriptors_at_rest(self) -> int:
        """Return how many descriptors are open after the idle timeout has closed idle connections."""
        await asyncio.sleep(IDLE_S + 1)
        return self.server.descriptors()

    def count_ended(self) -> None:
        """Add the connections that this life has ended, by the limit that was reached, to the figures."""
        with urlopen(Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"})) as response:
            for why, count in ENDED.findall(response.read().decode()):
                self.figures.ended[why] += int(float(count))

    def age(self) -> float:
        """Return the seconds since this life began."""
        return time.monotonic() - self._started

    def _note_size(self) -> None:
        server = self.server
        self.figures.sizes.append(
            Size(self.number, self.age(), server.resident_mib(), server.descriptors(), server.cpu_s())
        )

    def _check(self, info: dict[str, Any], life: int) -> None:
        """Complain if /server_info reports a failure, a lost slot or page, or more sessions than allowed."""
        slots, pages = info["gauges"]["slots"], info["gauges"]["pages"]
        lost = {name: info["counters"][name] for name in WHOLE_COUNTERS if info["counters"].get(name)}
        wrong = {
            "audit": info["audit"],
            "counters": lost,
            "slots": sum(slots.values()) - SLOTS,
            "pages": sum(pages.values()) - PAGES,
            "sessions beyond the cap": max(0, info["sessions"]["open"] - SESSION_CAP),
        }
        if any(wrong.values()):
            self.figures.complain(f"life {life}: {wrong}")

    def _read_log(self) -> None:
        """Complain about log lines that no client may cause.

        Drop all lines, because an hour of log needs much memory.
        """
        server, read = self.server, len(self.server.log)
        for line in troubles(server):
            self.figures.complain(f"life {self.number}, log: {line}")
        del server.log[:read], server.output[:-50]


class Caller:
    """An HTTP client with an API key that opens a new connection for each request."""

    def __init__(self, lives: Lives, key: str, kind: str) -> None:
        self._lives = lives
        self._kind = kind
        self._headers = {"Authorization": f"Bearer {key}"}

    async def __aenter__(self) -> "Caller":
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """Return status and body, or None without an answer. Complain about that unless the server was killed."""
        life = await self._lives.current()
        try:
            async with self._http.request(method, self._lives.url + path, json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            killed = self._lives.is_over(life)
            self._lives.figures.answered(self._kind, None if killed else 0)
            if not killed:
                self._lives.figures.complain(f"{self._kind}: {method} {path}: {error!r}")
            return None
        self._lives.figures.answered(self._kind, response.status)
        return response.status, answer
