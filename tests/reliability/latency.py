"""The latency of answers to the well-behaved client, for each window (named time span) of a run."""

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tests.api.server_process import ROOT
from tests.reliability.figures import Figures, quantile
from tests.reliability.lives import Lives
from tests.reliability.well_behaved import Measurement


class Latency:
    """The well-behaved client in a process of its own, and the measurements that it prints."""

    def __init__(self, lives: Lives, figures: Figures) -> None:
        self._lives, self._figures = lives, figures
        self._began: list[tuple[float, str]] = []  # start and name of each window
        self._measurements: list[Measurement] = []

    @contextlib.asynccontextmanager
    async def measured(self, model: Path, key: str) -> AsyncIterator[None]:
        """Run the well-behaved client while the block runs."""
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.reliability.well_behaved", str(self._lives.url_file), str(model), key,
            cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        reading = asyncio.create_task(self._read(client))
        try:
            yield
        finally:
            client.terminate()
            await reading
            await client.wait()

    async def _read(self, client: asyncio.subprocess.Process) -> None:
        assert client.stdout is not None
        while (line := await client.stdout.readline()).endswith(b"\n"):
            self._measurements.append(msgspec.json.decode(line, type=Measurement))

    def open(self, window: str, now: float) -> None:
        """Begin a window with this name, which ends where the next window begins."""
        self._began.append((now, window))

    def judge(self) -> dict[str, list[float]]:
        """Return the latencies in seconds of the right answers, by window.

        Complain about wrong and missing answers, unless the server was killed in the meantime.
        """
        by_window: dict[str, list[float]] = {name: [] for _, name in self._began}
        for measurement in self._measurements:
            window = next((name for began, name in reversed(self._began) if began <= measurement.began), None)
            killed = any(
                low - 1 < measurement.began + measurement.took and measurement.began < high
                for low, high in self._lives.down
            )
            self._figures.answered("well-behaved", None if killed and not measurement.status else measurement.status)
            if measurement.status == 0 and not killed:
                self._figures.complain(f"the well-behaved client was not answered: {measurement}")
            elif measurement.status == 200 and not measurement.right:
                self._figures.complain(f"the well-behaved client was answered wrongly: {measurement}")
            elif measurement.status == 200 and window is not None:
                by_window[window].append(measurement.took)
        return by_window


def shown(windows: dict[str, list[float]]) -> str:
    return "; ".join(
        f"{name}: {len(took)} answers, p50 {1000 * statistics.median(took):.1f} ms, "
        f"p99 {1000 * quantile(took, 0.99):.1f} ms, longest {1000 * max(took):.0f} ms"
        for name, took in windows.items()
        if took
    )
