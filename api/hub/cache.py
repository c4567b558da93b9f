"""The hub's cache on disk, in the layout that huggingface_hub and all that use it share.

models--ORG--NAME/
  blobs/DIGEST                     the content of a file
  blobs/DIGEST.incomplete          the part of it that has arrived
  snapshots/COMMIT/FILE            a link to a blob
  refs/REVISION                    the commit of a branch or a tag
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock

from baton.api.hub.errors import HubError
from baton.api.hub.gguf_names import chosen, grouped
from baton.api.hub.names import HubName
from baton.api.hub.repository import RemoteFile, Repository, weight_names

DEFAULT_REVISION = "main"


class RepositoryCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, cache: Path, name: HubName) -> None:
        folder = repo_folder_name(repo_id=name.repository, repo_type="model")
        self._name = name
        self._folder = cache / folder
        self._locks = cache / ".locks" / folder

    def blob(self, file: RemoteFile) -> Path:
        """Return the place of a file's content."""
        return self._folder / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        """Return the place of the part of a file that has arrived."""
        return self._folder / "blobs" / f"{file.digest}.incomplete"

    def holds(self, file: RemoteFile) -> bool:
        """Return whether the file's content is there, with the size that the hub states."""
        blob = self.blob(file)
        return blob.is_file() and blob.stat().st_size == file.size

    def missing_bytes(self, files: Iterable[RemoteFile]) -> int:
        """Return how many bytes are still to be fetched for these files."""
        missing = (file for file in set(files) if not self.holds(file))
        return sum(max(file.size - size_of(self.partial(file)), 0) for file in missing)

    def room(self) -> int:
        """Return the free bytes of the cache's disk."""
        existing = next(folder for folder in (self._folder, *self._folder.parents) if folder.is_dir())
        return shutil.disk_usage(existing).free

    def lock(self, file: RemoteFile) -> AbstractContextManager[object]:
        """Return the lock of a file, which all users of the cache take before they write it."""
        self.blob(file).parent.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(self._locks / f"{file.digest}.lock")

    def link(self, repository: Repository, files: Iterable[RemoteFile]) -> Path:
        """Make the snapshot's links to these files. Return the snapshot's folder."""
        snapshot = self._folder / "snapshots" / repository.commit
        for file in files:
            link_to(self.blob(file), snapshot / file.name)
        return snapshot

    def record(self, repository: Repository) -> None:
        """Record the commit of the revision, whose files are all there now."""
        ref = self._folder / "refs" / (self._name.revision or DEFAULT_REVISION)
        if ref.name != repository.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(repository.commit)

    def snapshot(self) -> Path | None:
        """Return the folder or GGUF file of the name, if the cache holds its weights completely; otherwise None."""
        revision = self._name.revision or DEFAULT_REVISION
        ref = self._folder / "refs" / revision
        folder = self._folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
        names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        weights = weight_names(names, lambda name: (folder / name).read_bytes())
        if self._name.quantization is not None or not weights:
            with suppress(HubError):
                return folder / chosen(grouped(names), self._name)[0]
            return None
        if not names.intersection(("config.json", "params.json")):
            return None
        return folder if weights and names.issuperset(weights) else None


def link_to(blob: Path, place: Path) -> None:
    """Make `place` a link to a blob, or a copy on systems without links."""
    if place.exists() and place.samefile(blob):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    made = place.with_name(f".{place.name}.{os.getpid()}")  # Another process may make the same link.
    made.unlink(missing_ok=True)
    try:
        made.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        shutil.copy(blob, made)
    made.replace(place)


def size_of(file: Path) -> int:
    """Return the size of a file, 0 if it does not exist."""
    return file.stat().st_size if file.is_file() else 0
