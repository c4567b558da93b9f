"""An estimate of the time that a new request waits for a row."""

MOST_COUNTED = 32  # number of ended requests after which all older measurements are halved


class RowQueue:
    """An estimate of the time until a new request gets a row, from periodic observations of the rows.

    Every waiting request needs a row that another request gives back. If requests hold r rows for D seconds each, a row
    is given back every D ÷ r seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._at: float | None = None  # time of the last call of `look`
        self._waiting = self._ended = 0  # arguments of that call
        self._held = self._counted = 0.0  # row-seconds, and the number of requests that have ended in them

    def look(self, now: float, rows: int, waiting: int, ended: int) -> None:
        """Note how many requests run, wait, and have ended so far. `ended` begins at 0 again when the actors restart.

        A request that waits at only one call may have arrived just before it, so it does not count as waiting.
        """
        if self._at is not None:
            self._held += rows * (now - self._at)
            self._counted += max(ended - self._ended, 0)
        if self._counted > MOST_COUNTED:
            self._held, self._counted = self._held / 2, self._counted / 2
        still = min(waiting, self._waiting)
        self.seconds = still * self._held / self._counted / rows if self._counted and rows else 0.0
        self._at, self._waiting, self._ended = now, waiting, ended
