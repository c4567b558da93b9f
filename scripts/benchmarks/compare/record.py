"""The record of one revision on one machine: a list of commands, run one after another."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.common.contenders import Workbench
from scripts.launch import ROOT

BENCH = ROOT / "scripts" / "bench"
# File name of each record: arguments of its command. A round of `engine` takes two minutes, of `serving` three.
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
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for the table and JSON of each")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), help="run these instead of all")
    parser.add_argument("--more", default="", metavar="OPTIONS", help="more options for every command, as one string")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    """Run all commands, even if some fail. Return 1 if any failed, else 0."""
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
