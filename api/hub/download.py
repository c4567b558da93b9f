"""The download of several files at once."""

from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event, Lock

from baton.api.hub.connection import Hub
from baton.api.hub.errors import HubError
from baton.api.hub.repository import RemoteFile, Repository
from baton.api.hub.transfer import TransferStopped, fetch_file

AT_ONCE = 4

Progress = Callable[[int, int], None]


def fetch_files(hub: Hub, repository: Repository, files: Collection[RemoteFile], on_progress: Progress) -> None:
    """Fetch files into the cache, AT_ONCE at a time. Raises HubError; files and parts that have arrived stay.

    on_progress: called with (bytes that are there, bytes in total).
    """
    check_room(hub, repository, files)
    progress, stop = Total(sum(file.size for file in files), on_progress), Event()
    with ThreadPoolExecutor(AT_ONCE, "hub") as pool:
        transfers = [pool.submit(fetch_file, hub, repository, file, progress.add, stop) for file in files]
        try:
            wait(transfers, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    failures = [error for transfer in transfers if not transfer.cancelled() and (error := transfer.exception())]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, TransferStopped))


def check_room(hub: Hub, repository: Repository, files: Collection[RemoteFile]) -> None:
    """Raise HubError unless the disk has room for the rest of the files."""
    cache = hub.cache_of(repository.name)
    needed, room = cache.missing_bytes(files), cache.room()
    if needed > room:
        raise HubError(
            f"{repository.name} needs {needed / 2**30:.2f} GiB in the cache, and its disk has {room / 2**30:.2f} GiB "
            "free; HF_HOME moves the cache to another disk"
        )


class Total:
    """The number of bytes that have arrived for all files. Any thread may call `add`."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self._done = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = Lock()

    def add(self, count: int) -> None:
        """Count bytes and report the sum."""
        with self._lock:
            self._done += count
            self._on_progress(self._done, self._total)
