"""What tells one model's states from another's."""

import hashlib
import os
from pathlib import Path

SAMPLE = 1 << 16


def fingerprint(folder: Path, *more: object) -> str:
    """A digest of a checkpoint's configuration and weights, and of `more`: what else its states depend on.

    Of each weights file the length, the beginning and the end are taken: one of them has the header of every tensor.
    """
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    for path in sorted([folder / "config.json", *weights]):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {length}".encode())
            digest.update(file.read(SAMPLE))
            file.seek(max(length - SAMPLE, 0))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
