"""The commands of scripts/ enter .venv by themselves, whichever Python starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("bench", "evaluate", "fuzz", "mutate", "replay", "simulate", "train_demo", "tune")


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the tests run in another environment than .venv")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_without_packages_can_start_a_command(command: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # -S leaves out site-packages, -I the caller's variables and folder: only the standard library is left.
    bare = [str(Path(sys.base_prefix) / "bin" / "python3"), "-I", "-S"]
    done = subprocess.run(
        [*bare, str(ROOT / "scripts" / command), "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {command} ")


def test_every_python_command_is_tried() -> None:
    commands = {file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and not file.suffix}
    of_python = {name for name in commands if b"python" in (ROOT / "scripts" / name).read_bytes().partition(b"\n")[0]}
    assert of_python - {"trace"} == set(COMMANDS)
