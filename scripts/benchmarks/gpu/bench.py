"""What all parts of scripts/bench gpu share."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.benchmarks.gpu.operations.listed import CHECKED, TIMED, TOYS, Build
from scripts.benchmarks.gpu.records import Records


@dataclass
class Bench:
    """is_toy: all is done at sizes that show that it runs. only: kernels whose names match. failures: what is wrong."""

    device: torch.device
    records: Records
    folder: Path
    is_toy: bool = False
    only: str = ""
    failures: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations that are timed. Triton's interpreter has no bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def checked(self) -> dict[str, Build]:
        return self._matching(TOYS if self.is_toy else CHECKED)

    def timed(self) -> dict[str, Build]:
        return self._matching(TOYS if self.is_toy else TIMED)

    def _matching(self, builds: dict[str, Build]) -> dict[str, Build]:
        return {name: build for name, build in builds.items() if re.search(self.only, name)}

    def failed(self, part: str, name: str, what: str) -> None:
        """Told, and not recorded: so it is done again."""
        self.failures.append(f"{part}: {name}: {what}")
        print(f"{part:<8} {name:<44} FAILED: {what}", flush=True)
