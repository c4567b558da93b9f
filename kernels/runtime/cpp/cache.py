"""The cache of compiled libraries: a folder that is private to one user and shared by that user's processes."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o700
DIGEST = 16


class CacheError(Exception):
    """The folder is not safe to load code from, or cannot be written."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path in BATON_CACHE if that is set, else "baton" in XDG_CACHE_HOME or ~/.cache."""
    if environment.get("BATON_CACHE"):
        return Path(environment["BATON_CACHE"])
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "baton"


def open_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raise CacheError unless only its owner, this user, can access it.

    Code is loaded from the folder, so another user must not be able to write to it.
    """
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
    """Return the path of the library with this key; build it if there is none yet.

    Its file name contains a digest of its content, so that a damaged file is detected and built again. A file lock
    lets only one of several processes build.

    build: writes the library to the path that it is called with.
    """
    with _locked(folder):
        if (path := find(folder, key)) is not None:
            return path
        for damaged in folder.glob(f"{key}-*.so"):
            damaged.unlink()
        for abandoned in folder.glob("*.new"):  # Left by a killed process: the lock lets only this process build.
            abandoned.unlink()
        temporary = folder / f"{key}.{os.getpid()}.new"
        try:
            build(temporary)
            return store(temporary, key)
        finally:
            temporary.unlink(missing_ok=True)


def find(folder: Path, key: str, suffix: str = ".so") -> Path | None:
    """Return the path of the library with this key; None if the folder has none, or only a damaged one."""
    for path in sorted(folder.glob(f"{key}-*{suffix}")):
        if path.name == _name(key, path.read_bytes(), suffix):
            return path
    return None


def store(built: Path, key: str, suffix: str = ".so") -> Path:
    """Give a new library its name, in the folder where it was built, and return its path."""
    path = built.with_name(_name(key, built.read_bytes(), suffix))
    built.rename(path)  # Atomic, so that a process never sees half a library.
    return path


def _name(key: str, content: bytes, suffix: str) -> str:
    """Return the file name of a library, or of a compiled source, with this key and content."""
    return f"{key}-{hashlib.sha256(content).hexdigest()[:DIGEST]}{suffix}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's file lock."""
    import fcntl  # Windows lacks fcntl, but it has no native code, so this never runs there.

    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
