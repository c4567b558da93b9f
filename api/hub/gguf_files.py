"""A GGUF file of a repository on the hub: it can be outlined, to be inspected, or fetched, to be served."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.api.hub.connection import Hub
from baton.api.hub.download import Progress, check_room, fetch_files
from baton.api.hub.errors import explaining
from baton.api.hub.gguf_names import chosen, grouped
from baton.api.hub.repository import RemoteFile, Repository

MOST_READ = 10**8  # bytes
FIRST_READ = 2**20  # bytes; the header of a large vocabulary has several of these


class HubGguf:
    """A GGUF file of a repository."""

    tokenizers: tuple[RemoteFile, ...] = ()  # The tokenizer is in the file.

    def __init__(self, hub: Hub, repository: Repository) -> None:
        """Raises HubError unless the repository has exactly one file for its name."""
        self.repository = repository
        self._hub, self._cache = hub, hub.cache_of(repository.name)
        self._files = [repository.files[name] for name in chosen(grouped(repository.files), repository.name)]

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that are not in the cache."""
        return self._cache.missing_bytes(self._files)

    def outlined(self, with_tokenizer: bool) -> AbstractContextManager[Path]:
        """Return a context with a file for inspection: the header, but no weights."""
        return outline(self._hub, self.repository, self._files)

    def check_room(self) -> None:
        """Raise HubError unless the disk has room for what is missing."""
        check_room(self._hub, self.repository, self._files)

    def fetch(self, on_progress: Progress, check: Callable[[Path], None] | None) -> Path:
        """Fetch what is missing, and return the file. `check` is called before, with its outline."""
        if not all(map(self._cache.holds, self._files)):
            if check is not None:
                with self.outlined(with_tokenizer=True) as file:
                    check(file)
            fetch_files(self._hub, self.repository, self._files, on_progress)
        with explaining(self.repository.name, self._hub.endpoint):
            folder = self._cache.link(self.repository, self._files)
            self._cache.record(self.repository)
        return folder / self._files[0].name


@contextmanager
def outline(hub: Hub, repository: Repository, files: list[RemoteFile]) -> Iterator[Path]:
    """Make files with the headers of these files, and with holes instead of the tensors. Yield the first one."""
    with TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as name:
        for file in files:
            place = Path(name) / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as opened:
                opened.write(read_header(hub, repository, file))
                opened.truncate(file.size)
        yield Path(name) / files[0].name


def read_header(hub: Hub, repository: Repository, file: RemoteFile) -> bytes:
    """Return the beginning of a file, as much as its header needs."""
    from baton.models.gguf.header import MAGIC, has_whole_header  # It imports torch, and `baton pull` needs no headers.

    content, end = b"", FIRST_READ
    while len(content) < min(file.size, MOST_READ) and not has_whole_header(content):
        if content and not content.startswith(MAGIC):
            break  # The inspection says what is wrong.
        content += hub.read(repository, file, len(content), min(end, file.size))
        end *= 2
    return content
