"""Records of measurements: one line of JSON for each figure, written at once, so that a run can be resumed."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Records:
    """A file of records.

    about: fields of every line, such as the GPU and the revision. A line with other values does not count as recorded.
    """

    def __init__(self, file: Path, about: dict[str, str]) -> None:
        self._file, self._about = file, about
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        self._recorded = {(line["part"], line["name"]) for line in lines if about.items() <= line.items()}

    def has(self, part: str, name: str) -> bool:
        """Return whether measurement `name` of a part was recorded with the same `about`."""
        return (part, name) in self._recorded

    def keep(self, part: str, name: str, **figures: Any) -> None:
        """Write and print the figures of one measurement."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"part": part, "name": name, **figures, "at": at, **self._about}
        self._recorded.add((part, name))
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        columns = "  ".join(f"{key} {_formatted(value)}" for key, value in figures.items())
        print(f"{part:<8} {name:<44} {columns}", flush=True)


def _formatted(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
