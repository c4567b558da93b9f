"""A process of its own, which tells what loading a checkpoint takes at most: the folder, and how, as JSON."""

import gc
import json
import sys
from pathlib import Path

import torch

from baton.actors.runtime.sizing import weight_bytes
from baton.models.batch import Model
from baton.models.loading.checkpoint import load_model


def taken(kind: str) -> int:
    """Bytes of this process in memory, its files' pages with them: VmRSS now, or VmHWM the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def measure(folder: Path, dtype: torch.dtype, bits: int | None) -> tuple[int, Model]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # From now on the most is counted anew.
    before = taken("VmRSS")
    model = load_model(folder, dtype, torch.device("cpu"), bits=bits)
    return taken("VmHWM") - before, model


def main(folder: Path, ways: dict[str, tuple[str, int | None]]) -> dict[str, dict[str, int]]:
    measure(folder, torch.float32, None)  # What is imported and allocated once is not counted.
    found = {}
    for name, (dtype, bits) in ways.items():
        peak, model = measure(folder, getattr(torch, dtype), bits)
        found[name] = {"peak": peak, "result": weight_bytes(model)}
        del model
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
