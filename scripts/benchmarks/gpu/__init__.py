"""Checks and measurements on a GPU, in parts of less than ten minutes each. A later run skips recorded measurements."""

import argparse
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from scripts.benchmarks.common.figures import revision
from scripts.benchmarks.gpu.bench import Bench
from scripts.benchmarks.gpu.records import Records
from scripts.launch import ROOT

OUT = ROOT / "build" / "gpu" / "records.jsonl"


def parts() -> dict[str, Callable[[Bench], None]]:
    """Return the parts by name, the most valuable first. Imports happen here, because the parts need Triton."""
    from scripts.benchmarks.gpu import kernels, models, processes

    return {
        "kernels": kernels.check,
        "suite": processes.suite,
        "speed": kernels.time_all,
        "models": models.speeds,
        "idle": models.idle,
        "server": processes.server,
        "trace": models.trace,
    }


NAMES = ("kernels", "suite", "speed", "models", "idle", "server", "trace")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)}; by default all, in this order")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="records: one line of JSON for each figure"
    )
    parser.add_argument("--revision", help="name of the revision in records, where there is no git")
    parser.add_argument("--only", default="", metavar="REGEX", help="only kernels whose names match")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which show that everything runs, also on a CPU")


def run(options: argparse.Namespace, workbench: object) -> int:
    """Run the named parts. Return 2 if this machine cannot run them, 1 if anything failed, else 0."""
    unknown = set(options.parts) - set(NAMES)
    if unknown:
        print(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
        return 2
    if reason := why_not(options.toy):
        print(reason)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    records = Records(options.out, about(device, options.revision))
    bench = Bench(device, records, options.out.parent, options.toy, options.only)
    for name in options.parts or NAMES:
        began, failures = time.monotonic(), len(bench.failures)
        try:
            parts()[name](bench)
        except torch.AcceleratorError as error:
            # The CUDA context is lost: every later call in this process would fail too.
            bench.failed(name, "all", f"nothing more can be done in this process: {error!r}"[:300])
            break
        except Exception as error:
            bench.failed(name, "all", repr(error)[:300])
        state = "failed" if len(bench.failures) > failures else "done"
        print(f"{name}: {state} in {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(bench.failures))


def why_not(is_toy: bool) -> str | None:
    """Return the reason why no part can run on this machine, or None."""
    if find_spec("triton") is None:
        return "scripts/bench gpu needs triton"
    if not is_toy and not torch.cuda.is_available():
        return "scripts/bench gpu needs a GPU, and there is none here; --toy shows that it runs"
    return None


def about(device: torch.device, name_of_revision: str | None) -> dict[str, str]:
    """Return the fields that every record has."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"gpu": name, "revision": name_of_revision or revision(), **versions}
