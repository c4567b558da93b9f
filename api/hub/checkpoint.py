"""A checkpoint on the hub: it can be outlined, to be inspected, or fetched, to be served."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import structlog

from baton.api.hub.connection import Hub
from baton.api.hub.download import Progress, check_room, fetch_files
from baton.api.hub.errors import HubError, explaining
from baton.api.hub.gguf_files import HubGguf
from baton.api.hub.gguf_names import grouped
from baton.api.hub.names import HubName
from baton.api.hub.outline import outline
from baton.api.hub.repository import WEIGHTS, RemoteFile, Repository

Check = Callable[[Path], None]
"""Called with the outline of a checkpoint before its weights are fetched; it raises an exception to refuse them."""


class HubCheckpoint:
    """The files of a repository that a server needs. Its settings are in the cache."""

    def __init__(self, hub: Hub, repository: Repository) -> None:
        self.repository = repository
        self.tokenizers = repository.tokenizers()
        self._hub = hub
        self._cache = hub.cache_of(repository.name)
        self._settings = repository.settings()
        fetch_files(hub, repository, self._settings, unreported)
        self._link(self._settings)
        self._weights = repository.weights(self._read)

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that are not in the cache."""
        return self._cache.missing_bytes([*self.tokenizers, *self._weights])

    @property
    def is_cached(self) -> bool:
        """Whether all weights are in the cache, complete and checked."""
        return bool(self._weights) and all(map(self._cache.holds, self._weights))

    def outlined(self, with_tokenizer: bool) -> AbstractContextManager[Path]:
        """Return a context with a folder for inspection: headers of the weights, but no weights."""
        tokenizers = self.tokenizers if with_tokenizer else []
        return outline(self._hub, self.repository, [*self._settings, *tokenizers], self._weights)

    def check_room(self) -> None:
        """Raise HubError unless the disk has room for what is missing."""
        check_room(self._hub, self.repository, [*self.tokenizers, *self._weights])

    def fetch(self, on_progress: Progress, check: Check | None) -> Path:
        """Fetch what is missing, and return the folder. `check` is called before the weights are fetched."""
        fetch_files(self._hub, self.repository, self.tokenizers, unreported)
        if not self.is_cached:
            if check is not None:
                with self.outlined(with_tokenizer=True) as folder:
                    check(folder)
            if not self._weights:
                raise HubError(f"{self.repository.name} holds no safetensors files and no pytorch_model.bin")
            fetch_files(self._hub, self.repository, self._weights, on_progress)
        folder = self._link([*self.tokenizers, *self._weights])
        self._cache.record(self.repository)
        return folder

    def _link(self, files: list[RemoteFile]) -> Path:
        with explaining(self.repository.name, self._hub.endpoint):
            return self._cache.link(self.repository, files)

    def _read(self, name: str) -> bytes:
        return self._cache.blob(self.repository.files[name]).read_bytes()


def find(hub: Hub, name: HubName) -> HubCheckpoint | HubGguf | Path:
    """Return a checkpoint of the hub; if the hub does not answer, what the cache has under this name.

    Raises HubError if neither is possible.
    """
    try:
        repository = hub.look_up(name)
        if not is_gguf(repository):
            return HubCheckpoint(hub, repository)
    except HubError as error:
        found = hub.cache_of(name).snapshot()
        if found is None:
            raise
        structlog.get_logger().warning("serving from the cache", model=str(name), folder=str(found), why=str(error))
        return found
    return HubGguf(hub, repository)  # A name that stands for no single file is an error, whatever the cache has.


def is_gguf(repository: Repository) -> bool:
    """Return whether a name stands for a GGUF file: it names one, or the repository has no other weights."""
    if repository.name.quantization is not None:
        return True
    others = repository.matching([pattern for _, pattern in WEIGHTS])
    return not others and bool(grouped(repository.files))


def unreported(done: int, total: int) -> None:
    """Report no progress: small files take a moment."""
