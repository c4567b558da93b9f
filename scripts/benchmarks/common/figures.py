"""Statistics of measured figures (medians, quantiles, ratios within a round), tables, and records of the machine."""

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from scripts.launch import ROOT


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value v with at least `share` of the values <= v. Raises ValueError if there are none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    exact = share * len(ordered)
    rank = int(exact) if exact == int(exact) else int(exact) + 1
    return ordered[max(rank, 1) - 1]


def ratios(rounds: Sequence[dict[str, float]], of: str, to: str) -> Spread:
    """Return the spread, over all rounds, of contender `of`'s figure divided by contender `to`'s in the same round."""
    return Spread.of([figures[of] / figures[to] for figures in rounds])


class NeverAtOnceError(Exception):
    """An error: streams that should be measured together did not overlap in time."""


def decode_rate(streams: Sequence[Sequence[tuple[float, int]]], least: int = 1) -> float:
    """Return tokens per second of all streams together, counted only while all of them run.

    streams: for each stream, pairs (time in seconds, number of the stream's tokens that had arrived by then).
    Raises NeverAtOnceError if a stream delivers fewer than `least` tokens while all of them run.
    """
    begin, end = max(stream[0][0] for stream in streams), min(stream[-1][0] for stream in streams)
    within = [[count for at, count in stream if begin <= at <= end] for stream in streams]
    counts = [inside[-1] - inside[0] if inside else 0 for inside in within]
    if begin >= end or min(counts) < least:
        raise NeverAtOnceError(f"the {len(streams)} answers were never under way all at once: take more steps")
    return sum(counts) / (end - begin)


def steady_rate(generate: Callable[[int], Sequence[Sequence[tuple[float, int]]]], steps: int) -> float:
    """Return the decode_rate of streams that overlap for at least `steps` / 2 tokens of each stream.

    Streams that start at very different times overlap less. They are then repeated with 2, 4 and 8 times the tokens.

    generate: takes a number of tokens; returns the arrivals of answers of that length, as decode_rate takes them.
    Raises NeverAtOnceError if 8 times the tokens are still too few.
    """
    for tokens in (steps, 2 * steps, 4 * steps):
        with contextlib.suppress(NeverAtOnceError):
            return decode_rate(generate(tokens + 1), least=steps // 2)
    return decode_rate(generate(8 * steps + 1), least=steps // 2)


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table as text, with columns aligned to the right."""
    first = max(len(title), *map(len, rows))
    widths = [max(len(column), *(len(cells[i]) for cells in rows.values())) for i, column in enumerate(columns)]
    lines = [(title, columns), *rows.items()]
    return "\n".join(
        f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in lines
    )


def describe_machine(threads: int) -> dict[str, Any]:
    """Return the facts that a later reader needs in order to compare a record: time, revision, CPU, threads."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "cpu": cpu_name(),
        "processors": os.cpu_count(),
        "threads": threads,
    }


def revision() -> str:
    """Return the git revision of this checkout, or an empty string where there is no git."""
    if not shutil.which("git"):
        return ""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")
