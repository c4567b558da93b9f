"""What a run has sent, what came back, and what was wrong; printed at its end."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_WRONG = 20


@dataclass(frozen=True)
class Size:
    """Of the server's process, at an age (seconds) in one of its lives; cpu_s: the processors' time used until then."""

    life: int
    age: float
    resident_mib: float
    descriptors: int
    cpu_s: float


@dataclass
class Figures:
    """statuses: by kind of client and status; 0 is a connection that was closed without an answer, None one that a kill
    has cut. done: by name. ended: connections that the server has ended, by why. wrong: what must not be.
    """

    statuses: defaultdict[str, Counter[int | None]] = field(default_factory=lambda: defaultdict(Counter))
    done: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    sizes: list[Size] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def answered(self, kind: str, status: int | None) -> None:
        """Counts it. A status of the server's that no client may bring about is wrong."""
        self.statuses[kind][status] += 1
        if status is not None and status >= 500 and status not in (503, 507):
            self.complain(f"{kind}: status {status}")

    def complain(self, what: str) -> None:
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(what[:2000])

    def grown(self, life: int, since: float) -> tuple[Size, Size]:
        """Medians of the first and of the last third of what was seen of a life behind an age."""
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
    """The least value that so large a part of them does not exceed."""
    return sorted(values)[max(0, -int(-len(values) * part // 1) - 1)]
