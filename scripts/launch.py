"""Run a command of scripts/ in the environment that `scripts/environment` makes, whichever Python started it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("baton", "torch", "pytest")


def enter_environment() -> None:
    """Replace this process by the same command in .venv, made first if it is missing.

    Does nothing where the present environment has Baton with its test extra already, as an activated one has.
    """
    if all(find_spec(name) is not None for name in NEEDED):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix) == python.parents[1]:
        missing = ", ".join(name for name in NEEDED if find_spec(name) is None)
        sys.exit(f"{python} lacks {missing}: delete .venv, or run scripts/environment test")
    subprocess.run([ROOT / "scripts" / "environment", "test"], check=True)
    os.execv(python, [str(python), *sys.argv])


def link_package(tree: Path) -> Path:
    """Return a folder in which `baton` is a link to the checkout `tree`: first on sys.path, its code is imported.

    The folder is made in `tree`, under a name that copies of a checkout and package searches leave out.
    """
    folder = tree / ".package"
    folder.mkdir(exist_ok=True)
    link = folder / "baton"
    if not link.is_symlink():
        link.symlink_to("..", target_is_directory=True)
    return folder
