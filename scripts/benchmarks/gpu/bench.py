"""The state that all parts of scripts/bench gpu share."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.benchmarks.gpu.operations.listed import CHECKED, TIMED, TOYS, Build
from scripts.benchmarks.gpu.records import Records


@dataclass
class Bench:
    """One run of scripts/bench gpu: its device, its records, and its failures."""

    device: torch.device
    records: Records
    folder: Path  # for traces
    is_toy: bool = False  # whether sizes are tiny, which only shows that everything runs
    only: str = ""  # regular expression for the names of the kernels to check and time
    failures: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Type of timed weights and activations. Triton's interpreter has no bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def checked(self) -> dict[str, Build]:
        """Return the operations to compare with their references, by name."""
        return self._matching(TOYS if self.is_toy else CHECKED)

    def timed(self) -> dict[str, Build]:
        """Return the operations to time, by name."""
        return self._matching(TOYS if self.is_toy else TIMED)

    def _matching(self, builds: dict[str, Build]) -> dict[str, Build]:
        return {name: build for name, build in builds.items() if re.search(self.only, name)}

    def failed(self, part: str, name: str, what: str) -> None:
        """Print and count a failure. Failures are not recorded, so that the next run tries again."""
        self.failures.append(f"{part}: {name}: {what}")
        print(f"{part:<8} {name:<44} FAILED: {what}", flush=True)
