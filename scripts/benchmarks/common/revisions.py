"""Other git revisions of this checkout, for comparisons."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def check_out(revision: str, part: str, folder: Path) -> Path:
    """Extract one of a revision's folders into `folder`, and return `folder`.

    Raises CalledProcessError if the revision does not exist.
    """
    archive = subprocess.run(["git", "archive", revision, part], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(folder)], check=True, input=archive.stdout)
    return folder
