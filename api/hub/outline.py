"""An outline of a checkpoint: a folder with its small files, and with weight files that have only their headers."""

import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.api.hub.connection import Hub
from baton.api.hub.repository import RemoteFile, Repository

AT_ONCE = 8
FIRST_READ = 2**14  # bytes, enough for the headers of most files
LENGTH = 8  # bytes at the beginning of a safetensors file, with the length of its header
MAX_HEADER = 10**8  # bytes, as in safetensors


@contextmanager
def outline(
    hub: Hub, repository: Repository, small: Collection[RemoteFile], weights: Collection[RemoteFile]
) -> Iterator[Path]:
    """Make an outline, which lasts until the end of the context.

    small: files that are in the cache already
    weights: files whose headers are fetched; the rest of them are holes, which take no room on the disk
    """
    cache = hub.cache_of(repository.name)
    with TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file in small:
            (folder / file.name).parent.mkdir(exist_ok=True)
            shutil.copy(cache.blob(file), folder / file.name)
        headers = [file for file in weights if file.name.endswith(".safetensors")]
        with ThreadPoolExecutor(AT_ONCE, "headers") as pool:
            list(pool.map(partial(write_header, hub, repository, folder), headers))
        if not weights:
            for file in repository.unread_weights():
                (folder / file.name).touch()
        yield folder


def write_header(hub: Hub, repository: Repository, folder: Path, file: RemoteFile) -> None:
    """Write a file with the header of a safetensors file, and with a hole instead of the tensors."""
    start = hub.read(repository, file, 0, min(FIRST_READ, file.size))
    end = min(LENGTH + int.from_bytes(start[:LENGTH], "little"), file.size)
    if len(start) < end <= MAX_HEADER:
        start += hub.read(repository, file, len(start), end)
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as opened:
        opened.write(start[:end])
        opened.truncate(file.size)
