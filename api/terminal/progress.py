"""A progress bar, shown only if standard error is a terminal."""

import sys
import time

WIDTH = 30
REDRAW_S = 0.1


class ProgressBar:
    """A progress bar for a number of bytes. Any thread may call `update`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.is_shown = sys.stderr.isatty()
        self._drawn = 0.0

    def update(self, done: int, total: int) -> None:
        """Redraw the bar, but not more often than REDRAW_S."""
        now = time.monotonic()
        if not self.is_shown or not total or (done < total and now - self._drawn < REDRAW_S):
            return
        self._drawn = now
        filled = WIDTH * done // total
        bar = "█" * filled + "░" * (WIDTH - filled)
        print(f"\r{self._label} {bar} {done / 2**20:.0f}/{total / 2**20:.0f} MiB", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.is_shown and self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self.is_shown = False
