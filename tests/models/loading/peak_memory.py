"""A separate process that measures the peak memory of loading a checkpoint, and prints it as JSON."""

import gc
import json
import sys
from pathlib import Path

import torch

from baton.actors.runtime.sizing import weight_bytes
from baton.models.batch import Model
from baton.models.loading.checkpoint import load_model


def memory(kind: str) -> int:
    """Return this process's memory in bytes, with mapped files. kind: VmRSS for the present, VmHWM for the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def measure(folder: Path, dtype: torch.dtype, bits: int | None) -> tuple[int, Model]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak (VmHWM).
    before = memory("VmRSS")
    model = load_model(folder, dtype, torch.device("cpu"), bits=bits)
    return memory("VmHWM") - before, model


def main(folder: Path, ways: dict[str, tuple[str, int | None]]) -> dict[str, dict[str, int]]:
    measure(folder, torch.float32, None)  # Warm up: imports and one-time allocations are not counted.
    found = {}
    for name, (dtype, bits) in ways.items():
        peak, model = measure(folder, getattr(torch, dtype), bits)
        found[name] = {"peak": peak, "result": weight_bytes(model)}
        del model
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
