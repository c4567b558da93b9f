"""The figures of a run, printed at its end: requests by status, sizes of the server, and complaints."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_WRONG = 20


@dataclass(frozen=True)
class Size:
    """A measurement of the server's process: memory, descriptors and processor time."""

    life: int  # number of the server's life, counted from 1
    age: float  # seconds since this life began
    resident_mib: float
    descriptors: int
    cpu_s: float  # processor time used since the start of this life


@dataclass
class Figures:
    """A record of everything that a run counts."""

    statuses: defaultdict[str, Counter[int | None]] = field(default_factory=lambda: defaultdict(Counter))
    """Answers by kind of client and status. Status 0: closed without an answer; None: cut off by a kill."""
    done: Counter[str] = field(default_factory=Counter)  # how often each action was done, by its name
    ended: Counter[str] = field(default_factory=Counter)  # connections that the server has closed, by reason
    sizes: list[Size] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # complaints; a run passes only without any

    def answered(self, kind: str, status: int | None) -> None:
        """Count an answer, and complain if its status is a 5xx other than 503 and 507."""
        self.statuses[kind][status] += 1
        if status is not None and status >= 500 and status not in (503, 507):
            self.complain(f"{kind}: status {status}")

    def complain(self, what: str) -> None:
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(what[:2000])

    def grown(self, life: int, since: float) -> tuple[Size, Size]:
        """Return the median size in the first and in the last third of a life, from the age `since` (seconds) on."""
        seen = [size for size in self.sizes if size.life == life and size.age >= since]
        third = max(1, len(seen) // 3)
        return median(seen[:third]), median(seen[-third:])

    def __str__(self) -> str:
        total = sum(counter.total() for counter in self.statuses.values())
        lines = [f"{total} requests and connections; {dict(self.done)}; ended: {dict(self.ended)}"]
        for kind, counter in sorted(self.statuses.items()):
            by_status = sorted(counter.items(), key=lambda item: item[0] or 0)
            lines.append(f"  {kind}: " + ", ".join(f"{status} {count}" for status, count in by_status))
        for life in sorted({size.life for size in self.sizes}):
            first, last = self.grown(life, 0.0)
            lines.append(
                f"  life {life}: {first.resident_mib:.1f} MiB, {first.descriptors} descriptors at {first.age:.0f} s; "
                f"{last.resident_mib:.1f} MiB, {last.descriptors} at {last.age:.0f} s; "
                f"{(last.cpu_s - first.cpu_s) / max(last.age - first.age, 1):.2f} processors busy"
            )
        return "\n".join(lines)


def median(sizes: Sequence[Size]) -> Size:
    return Size(
        sizes[0].life,
        statistics.median(size.age for size in sizes),
        statistics.median(size.resident_mib for size in sizes),
        int(statistics.median(size.descriptors for size in sizes)),
        statistics.median(size.cpu_s for size in sizes),
    )


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is not exceeded by a fraction `part` of the values."""
    return sorted(values)[max(0, -int(-len(values) * part // 1) - 1)]
