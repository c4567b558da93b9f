"""The time that requests wait for a row."""

MOST_COUNTED = 32  # ended requests, until older ones count half


class RowQueue:
    """An estimate of the time until a further request gets a row, from what is seen of the rows again and again.

    Every waiting request needs a row that another one gives back. With r rows that a request holds for D seconds, one
    is given back every D ÷ r seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._at: float | None = None  # time of the last look
        self._waiting = self._ended = 0  # as of the last look
        self._held = self._counted = 0.0  # seconds of rows, and requests that have ended in that time

    def look(self, now: float, rows: int, waiting: int, ended: int) -> None:
        """Take in how many requests run, wait, and have ended so far; `ended` begins at 0 when the actors restart.

        A request that waits at only one look may have come just before it, so it does not count.
        """
        if self._at is not None:
            self._held += rows * (now - self._at)
            self._counted += max(ended - self._ended, 0)
        if self._counted > MOST_COUNTED:
            self._held, self._counted = self._held / 2, self._counted / 2
        still = min(waiting, self._waiting)
        self.seconds = still * self._held / self._counted / rows if self._counted and rows else 0.0
        self._at, self._waiting, self._ended = now, waiting, ended
