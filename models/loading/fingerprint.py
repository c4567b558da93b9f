"""Fingerprint of a model, by which stored states are matched to the model that made them."""

import hashlib
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from baton.models.config import ModelError, config_file, read_whole
from baton.models.gguf.header import SUFFIX
from baton.models.loading.shards import find_shards, read_headers
from baton.models.loading.source import read_source_config

SAMPLE = 512  # bytes


def fingerprint(folder: Path, *more: object) -> str:
    """Return a digest of a checkpoint's configuration and weights, and of `more`: whatever else states depend on.

    Each tensor contributes its name, dtype, shape, and SAMPLE bytes from its middle. Weights that were trained further
    have the same names and shapes, but differ in these bytes.
    """
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    with suppress(OSError, ModelError):
        digest.update(configuration(folder))
    with suppress(ModelError):
        for file, tensors in groupby(read_headers(find_shards(folder)), key=lambda tensor: tensor.file):
            with file.open("rb") as opened:
                for tensor in tensors:
                    digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                    opened.seek(max((tensor.start + tensor.stop - SAMPLE) // 2, tensor.start))
                    digest.update(opened.read(min(SAMPLE, tensor.stop - tensor.start)))
    return digest.hexdigest()


def configuration(source: Path) -> bytes:
    """Return the file of a folder's configuration, or a GGUF file's values. Raises OSError or ModelError."""
    if source.suffix == SUFFIX:
        return repr(sorted(read_source_config(source).values.items())).encode()
    return read_whole(config_file(source))
