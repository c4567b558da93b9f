"""Run a command of scripts/ in the environment that `scripts/environment` makes, whichever Python started it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("baton", "torch", "pytest")


def enter_environment() -> None:
    """Replace this process by the same command in .venv, which is made first if it is missing.

    Does nothing if the current environment already has Baton with its test extra, as an activated .venv has.
    """
    if all(find_spec(name) is not None for name in NEEDED):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix) == python.parents[1]:
        missing = ", ".join(name for name in NEEDED if find_spec(name) is None)
        sys.exit(f"{python} lacks {missing}: delete .venv, or run scripts/environment test")
    subprocess.run([ROOT / "scripts" / "environment", "test"], check=True)
    os.execv(python, [str(python), *sys.argv])


def import_from(tree: Path) -> None:
    """Let this process import `baton` from the checkout `tree`, not from the installed package.

    Raises RuntimeError if the process has already imported a part of `baton`.
    """
    if any(name.startswith("baton.") for name in sys.modules):
        raise RuntimeError("baton has been imported from elsewhere already")
    package = ModuleType("baton")
    package.__path__ = [str(tree)]
    sys.modules["baton"] = package
