"""The late device, an emulated accelerator: it executes enqueued operations late, in an order drawn from a seed."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from baton.kernels.runtime.triton import computes_for, watched
from baton.kernels.runtime.triton.selection import HAS_TRITON
from tests.late.log import FAULTS, STALLS, Entry, Fault, Kind, where
from tests.late.operations import Operations
from tests.late.streams import LateEvent, LateStream
from tests.late.tensors import Cell, LateTensor, Memory, spoil

MOST_LOCKED = 2**20  # bytes of the largest host buffer that may be allocated while the device computes


class LateDevice:
    """An emulated accelerator. Between enter and exit, code under a stream's `active` may use torch.device("meta").

    seed: draws when operations are executed; None: as late as possible, which is when the host waits for them
    raises: whether faults raise errors; a fault that would stall a device raises at once, all others at exit
    """

    def __init__(self, seed: int | None = None, can_capture: bool = True, raises: bool = True) -> None:
        self.can_capture, self.raises = can_capture, raises
        self.lock = threading.RLock()
        self.log: list[Entry] = []
        self.streams: list[LateStream] = []
        self.operations = Operations(self)
        self.entered: set[str] = set()  # names of the threads that have entered the device
        self._draws = None if seed is None else random.Random(seed)
        # The probability that the stream that advanced last advances again.
        self._patience = self._draws.choice([0.0, 0.7, 0.98]) if self._draws else 1.0
        self._is_setup = False
        self._error: Exception | None = None  # the first error of an executed operation
        self._pinned: dict[int, Tensor] = {}  # host buffers by address
        # The memories that the program still uses, by the storage of the meta tensors that describe them.
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._local = threading.local()  # the active streams of each thread
        self._entered = ExitStack()
        self._turn = self._default = self.stream()  # the stream that advanced last

    def __enter__(self) -> Self:
        if HAS_TRITON:
            self._entered.enter_context(computes_for("meta"))
        self._entered.enter_context(watched(self.operations.launch))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._entered.close()
        if kind is None:
            self.synchronize()
            if self.raises and self.faults:
                raise Fault("\n".join(map(str, self.faults)))

    # For tests

    def stream(self) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Allow reads and uploads while the block runs, and execute everything at its end."""
        self._is_setup = True
        try:
            with self.active(self._default):
                yield
            self.synchronize()
        finally:
            self._is_setup = False

    def of(self, host: Tensor) -> LateTensor:
        """Copy a host tensor to the device at once, without a stream."""
        with torch.inference_mode(False), _disable_current_modes():
            layout = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
            return self.wrap(Cell(layout, host.detach().clone()))

    def to(self, module: nn.Module) -> None:
        """Move a module's parameters to the device at once, without a stream."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(self.of(parameter), requires_grad=False)

    def read(self, tensor: Tensor) -> Tensor:
        """Execute everything that is enqueued, and return a copy on the host."""
        assert isinstance(tensor, LateTensor)
        self.synchronize()
        with torch.inference_mode(False):
            return self.values(tensor.cell, "read by a test", where()).clone()

    def synchronize(self) -> None:
        """Execute everything that is enqueued."""
        for stream in self.streams:
            self.finish(stream.record())

    def count(self, kind: Kind, since: int = 0) -> int:
        """Count the entries of this kind in the log, from entry `since` on."""
        return sum(entry.kind == kind for entry in self.log[since:])

    @property
    def faults(self) -> list[Entry]:
        return [entry for entry in self.log if entry.kind in FAULTS]

    # Methods for streams and operations

    @property
    def current(self) -> LateStream:
        """Return the active stream of this thread, or the default stream.

        As in CUDA, no other stream waits for the default stream.
        """
        active = self._active()
        return active[-1] if active else self._default

    @contextmanager
    def active(self, stream: LateStream) -> Iterator[None]:
        active = self._active()
        with self.operations.intercepting() if not active else ExitStack():
            active.append(stream)
            try:
                yield
            finally:
                active.pop()

    def note(self, kind: Kind, what: str, at: str) -> None:
        """Log an entry. Raises Fault if the entry is a fault that would stall a device."""
        if self._is_setup and kind in STALLS:
            return
        self.log.append(Entry(kind, what, at))
        if kind in STALLS and (self.raises or self.current.recording is not None):
            raise Fault(str(self.log[-1]))

    def wrap(self, cell: Cell) -> LateTensor:
        """Wrap a cell in a tensor for the program; tensors that are views of each other share one Memory."""
        storage = cell.layout.untyped_storage()._cdata
        memory = self._memories.get(storage)
        if memory is None:
            memory = self._memories[storage] = Memory()
            stream = self.current
            weakref.finalize(memory, stream.freed, cell, stream.recording).atexit = False
        return LateTensor(cell, memory, self.operations)

    def values(self, cell: Cell, what: str, at: str) -> Tensor:
        """Return a cell's values for the operation being executed. Log the fault "unwritten" if there are none."""
        if cell.values is None:
            self.note("unwritten", f"{what} uses values that are not computed yet", at)
            layout = cell.layout
            return spoil(torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="cpu"))
        return cell.values

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate a host buffer, filled with 0xA5."""
        if nbytes > MOST_LOCKED:
            self.note("page lock", f"{nbytes} bytes of host memory", where())
        buffer = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")
        self._pinned[buffer.data_ptr()] = buffer
        return buffer

    def is_pinned(self, host: Tensor) -> bool:
        """Return whether a tensor's memory is part of a host buffer."""
        at = host.untyped_storage().data_ptr()
        return at in self._pinned or any(begin <= at < begin + len(it) for begin, it in self._pinned.items())

    # Time

    def execute(self, step: Callable[[], None]) -> None:
        """Execute a step. After a step has failed no other is executed, and every wait raises the error."""
        if self._error is None:
            try:
                with torch.inference_mode():
                    step()
            except Exception as error:
                self._error = error

    def finish(self, event: LateEvent) -> None:
        """Execute steps until the event has passed. Raises AcceleratorError if an enqueued operation failed."""
        while not event.has_passed():
            with self.lock:
                self._next(event.stream).execute(1)
        if self._error is not None:
            raise torch.AcceleratorError(f"an enqueued operation failed: {self._error!r}") from self._error

    def pass_time(self, polled: bool = False) -> None:
        """Execute a few steps, or none. polled: the program is asking whether an event has passed; execute more."""
        if self._draws is None:
            return
        with self.lock:
            for _ in range(self._draws.choice([0, 1, 10, 1000] if polled else [0] * 20 + [1])):
                if not any(stream.ready() for stream in self.streams):
                    break
                self._next(self._turn).execute(1)

    def _next(self, target: LateStream) -> LateStream:
        """Return the stream to advance next. Without a seed this is `target`, or the stream that it waits for."""
        if self._draws is None:
            while (held := target.waits_for()) is not None:
                target = held.stream
            return target
        if not self._turn.ready() or self._draws.random() > self._patience:
            self._turn = self._draws.choice([stream for stream in self.streams if stream.ready()])
        return self._turn

    def _active(self) -> list[LateStream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        streams: list[LateStream] = self._local.streams
        return streams
