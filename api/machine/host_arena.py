"""The arena of host copies: on a GPU page-locked by several threads while weights load, on a CPU only mapped."""

from concurrent.futures import Future, ThreadPoolExecutor

import structlog
import torch
from torch import Tensor

from baton.actors.storage.arena import Arena
from baton.actors.storage.lines import HostLines
from baton.api.config import Config
from baton.api.machine.memory import bytes_of, free_memory
from baton.kernels.runtime.memory import mapped
from baton.models.batch import Model, allocate

HOST_SHARE = 0.125  # default of --host-memory, as a fraction of the free host memory
MOST_LOCKED_BY_DEFAULT = 64 * 2**30
"""The most bytes of the default on a GPU: page-locked memory cannot be swapped out, and locking it takes time."""
CHUNK = 2**30  # bytes that are locked by one call, at most, unless a line is larger
READY_STATES = 4  # on a CPU, free lines for so many states are given their memory before they are needed
THREADS = 8  # threads that lock memory: most of the time goes into zeroing pages


def host_bytes(config: Config, is_gpu: bool) -> int:
    """Return --host-memory, or its default: an eighth of the host's free memory, also if the device is a GPU."""
    if config.host_memory is not None:
        return config.host_memory
    share = int(free_memory(torch.device("cpu")) * HOST_SHARE)
    return min(share, MOST_LOCKED_BY_DEFAULT) if is_gpu else share


def lines_of(model: Model, page_size: int) -> HostLines:
    """Return the lines of host memory for copies of a model's states, which are laid out as in the pools."""
    pools = allocate(model, 1, 1, page_size, torch.device("meta"))
    return HostLines.fitting(pools.slots.shape[1], pools.blocks.shape[1])


def mapped_arena(model: Model, nbytes: int, page_size: int) -> Arena:
    """Return an arena of at most `nbytes` for a CPU. A page of it takes memory when it is first written to.

    Raises OSError if it cannot be mapped.
    """
    lines = lines_of(model, page_size)
    count = nbytes // lines.nbytes
    arena = Arena(lines, [mapped(count * lines.nbytes)] if count else [])
    arena.keep_ready(READY_STATES * lines.state)
    return arena


class ArenaStart:
    """The start of an arena on a GPU: threads lock its chunks from `begin` on, and `finish` waits for them."""

    def __init__(self, nbytes: int, page_size: int, device: torch.device) -> None:
        """nbytes: bytes that the arena may have at most"""
        self._nbytes, self._page_size, self._device = nbytes, page_size, device
        self._threads = ThreadPoolExecutor(THREADS, "page-lock")
        self._chunks: list[Future[Tensor | None]] = []

    def begin(self, model: Model) -> None:
        """Start to lock memory for copies of this model's states. Its weights need not be loaded yet."""
        self._lines = lines_of(model, self._page_size)
        left = self._nbytes // self._lines.nbytes
        most = max(CHUNK // self._lines.nbytes, 1)
        while left > 0:
            count = min(left, most)
            self._chunks.append(self._threads.submit(self._lock, count * self._lines.nbytes))
            left -= count

    def finish(self) -> Arena:
        """Return the arena. Log a warning if less memory could be locked than was wanted."""
        locked = [chunk for future in self._chunks if (chunk := future.result()) is not None]
        self._threads.shutdown()
        arena = Arena(self._lines, locked)
        if len(locked) < len(self._chunks):
            structlog.get_logger().warning(
                "less host memory",
                locked=bytes_of(arena.nbytes),
                wanted=bytes_of(self._nbytes),
                why="CUDA locks no more",
            )
        return arena

    def cancel(self) -> None:
        """Lock no further chunk: the model is not served."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lock(self, nbytes: int) -> Tensor | None:
        """Allocate and lock uint8 [nbytes], or return None if that is refused. A refusal leaves CUDA usable.

        torch's own allocator would round the size up to a power of two, and locks with one thread.
        """
        torch.cuda.set_device(self._device)
        try:
            memory = mapped(nbytes)
        except OSError:
            return None
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        return None if refused else memory
