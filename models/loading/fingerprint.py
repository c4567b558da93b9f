"""What tells one model's states from another's."""

import hashlib
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from baton.models.config import ModelError
from baton.models.loading.shards import find_shards, read_headers

SAMPLE = 512  # bytes


def fingerprint(folder: Path, *more: object) -> str:
    """A digest of a checkpoint's configuration and weights, and of `more`: what else its states depend on.

    Of each tensor the name, type and shape and some bytes of its middle are taken: weights that were trained further
    differ there, and only there.
    """
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    with suppress(OSError):
        digest.update((folder / "config.json").read_bytes())
    with suppress(ModelError):
        for file, tensors in groupby(read_headers(find_shards(folder)), key=lambda tensor: tensor.file):
            with file.open("rb") as opened:
                for tensor in tensors:
                    digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                    opened.seek(max((tensor.start + tensor.stop - SAMPLE) // 2, tensor.start))
                    digest.update(opened.read(min(SAMPLE, tensor.stop - tensor.start)))
    return digest.hexdigest()
