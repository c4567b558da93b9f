"""The folder of compiled libraries: private to the user, shared by their processes."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o700
DIGEST = 16


class CacheError(Exception):
    """The folder is none that code may be loaded from, or cannot be written."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """BATON_CACHE, else baton in XDG_CACHE_HOME or ~/.cache."""
    if environment.get("BATON_CACHE"):
        return Path(environment["BATON_CACHE"])
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "baton"


def open_folder(folder: Path) -> None:
    """Make it, if it is not there. Raises CacheError unless it is a folder that nobody else can write or read."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise CacheError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"{folder} is not a folder")
    if found.st_uid != os.geteuid():
        raise CacheError(f"{folder} belongs to user {found.st_uid}")
    if stat.S_IMODE(found.st_mode) != PRIVATE:
        raise CacheError(f"{folder} has mode {stat.S_IMODE(found.st_mode):o} and not 700")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written")


def fetch(folder: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The library of this key; where there is none yet, `build` writes it to the path that it is given.

    The name holds a digest of the content, so that a damaged file is built anew. Of several processes one builds.
    """
    with _locked(folder):
        for path in sorted(folder.glob(f"{key}-*.so")):
            if path.name == _name(key, path.read_bytes()):
                return path
            path.unlink()
        for abandoned in folder.glob("*.new"):
            abandoned.unlink()
        beside = folder / f"{key}.{os.getpid()}.new"
        try:
            build(beside)
            path = folder / _name(key, beside.read_bytes())
            beside.rename(path)
        finally:
            beside.unlink(missing_ok=True)
        return path


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:DIGEST]}.so"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # Windows has none, and no target.

    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
