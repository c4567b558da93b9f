"""Other git revisions of this checkout, for comparisons."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def check_out(revision: str, part: str, folder: Path) -> Path:
    """Extract one of a revision's folders into `folder`, and return `folder`.

    Raises SystemExit, with git's message, if the revision or its folder does not exist.
    """
    archive = subprocess.run(["git", "archive", revision, part], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{revision}: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "x", "-C", str(folder)], check=True, input=archive.stdout)
    return folder
