"""Everything that belongs into a record of one revision on one machine, one command after another."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.common.contenders import Workbench
from scripts.launch import ROOT

BENCH = ROOT / "scripts" / "bench"
# By the name of its files; a round of the engine takes about two minutes, of serving three.
COMMANDS = {
    "engine-mamba2": ("engine", "--rounds", "5"),
    "engine-granite": ("engine", "--model", "granite-151m", "--rounds", "5"),
    "engine-bundled": ("engine", "--model", "bundled", "--threads", "1", "--contenders", "baton", "bare"),
    "serving-unique": ("serving", "--rounds", "3"),
    "serving-shared": ("serving", "--workload", "shared", "--contenders", "baton", "--rounds", "3"),
    "serving-turns": ("serving", "--workload", "turns", "--requests", "32", "--contenders", "baton", "--rounds", "3"),
    "relay-mamba2": ("relay", "--rounds", "3"),
    "relay-null": ("relay", "--model", "null", "--rounds", "3"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="gets a table and a JSON of each")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), help="these, instead of all")
    parser.add_argument("--more", default="", metavar="OPTIONS", help="for every command, one string")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    """1 if one of them failed; the others are run all the same."""
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only or COMMANDS:
        began = time.monotonic()
        where = ["--weights", str(workbench.folder), "--json", str(options.folder / f"{name}.json")]
        command = [sys.executable, str(BENCH), *COMMANDS[name], *where, *options.more.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        (options.folder / f"{name}.txt").write_text(done.stdout + done.stderr)
        print(f"{name} ({time.monotonic() - began:.0f} s)\n{done.stdout}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr, file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))
