"""What was measured: a line of JSON for each figure, written as it comes, so that a run can be taken up again."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Records:
    """about: of each line, such as the GPU and the revision; what is there for the same is not measured again."""

    def __init__(self, file: Path, about: dict[str, str]) -> None:
        self._file, self._about = file, about
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        self._kept = {(line["part"], line["name"]) for line in lines if about.items() <= line.items()}

    def has(self, part: str, name: str) -> bool:
        return (part, name) in self._kept

    def keep(self, part: str, name: str, **figures: Any) -> None:
        """Written and printed."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"part": part, "name": name, **figures, "at": at, **self._about}
        self._kept.add((part, name))
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        told = "  ".join(f"{key} {_told(value)}" for key, value in figures.items())
        print(f"{part:<8} {name:<44} {told}", flush=True)


def _told(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
