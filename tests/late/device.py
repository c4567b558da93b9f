"""A pretended accelerator: what is enqueued on its streams is done late, in an order that a seed draws."""

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


class LateDevice:
    """torch.device("meta") while it is entered, for code under a stream's `active`; the package says what it finds.

    seed: draws how late what is done. None: as late as can be, which is when somebody waits for it.
    raises: faults are errors. What stalls a device is one where it is asked for, the rest when the device is left.
    """

    def __init__(self, seed: int | None = None, can_capture: bool = True, raises: bool = True) -> None:
        self.can_capture, self.raises = can_capture, raises
        self.lock = threading.RLock()
        self.log: list[Entry] = []
        self.streams: list[LateStream] = []
        self.operations = Operations(self)
        self._draws = None if seed is None else random.Random(seed)
        self._patience = self._draws.choice([0.0, 0.7, 0.98]) if self._draws else 1.0
        self._is_setup = False
        self._error: Exception | None = None
        self._pinned: dict[int, Tensor] = {}
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._local = threading.local()
        self._entered = ExitStack()
        self._turn = self._default = self.stream()

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

    # What tests ask for

    def stream(self) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Meanwhile anything may be read and uploaded, and at the end everything is done."""
        self._is_setup = True
        try:
            with self.active(self._default):
                yield
            self.synchronize()
        finally:
            self._is_setup = False

    def of(self, host: Tensor) -> LateTensor:
        """A copy of a host's tensor, at once."""
        with torch.inference_mode(False), _disable_current_modes():
            layout = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
            return self.wrap(Cell(layout, host.detach().clone()))

    def to(self, module: nn.Module) -> None:
        """Move the parameters, at once."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(self.of(parameter), requires_grad=False)

    def read(self, tensor: Tensor) -> Tensor:
        """A copy on the host, after everything that is enqueued."""
        assert isinstance(tensor, LateTensor)
        self.synchronize()
        with torch.inference_mode(False):
            return self.values(tensor.cell, "read by a test", where()).clone()

    def synchronize(self) -> None:
        for stream in self.streams:
            self.finish(stream.record())

    def count(self, kind: Kind, since: int = 0) -> int:
        """How many of the log's entries behind the first `since`."""
        return sum(entry.kind == kind for entry in self.log[since:])

    @property
    def faults(self) -> list[Entry]:
        return [entry for entry in self.log if entry.kind in FAULTS]

    # What streams and operations ask for

    @property
    def current(self) -> LateStream:
        """The active stream of this thread. Without one it is, as with CUDA, one for which no other waits."""
        active = self._active()
        return active[-1] if active else self._default

    @contextmanager
    def active(self, stream: LateStream) -> Iterator[None]:
        active = self._active()
        with self.operations.watching() if not active else ExitStack():
            active.append(stream)
            try:
                yield
            finally:
                active.pop()

    def note(self, kind: Kind, what: str, at: str) -> None:
        if self._is_setup and kind in STALLS:
            return
        self.log.append(Entry(kind, what, at))
        if kind in STALLS and (self.raises or self.current.recording is not None):
            raise Fault(str(self.log[-1]))

    def wrap(self, cell: Cell) -> LateTensor:
        """The program's hold on a cell, and on the memory that it shares with the cells it is a view of."""
        storage = cell.layout.untyped_storage()._cdata
        memory = self._memories.get(storage)
        if memory is None:
            memory = self._memories[storage] = Memory()
            stream = self.current
            weakref.finalize(memory, stream.freed, cell, stream.recording).atexit = False
        return LateTensor(cell, memory, self.operations)

    def values(self, cell: Cell, what: str, at: str) -> Tensor:
        """Of a cell, in a step that is being executed."""
        if cell.values is None:
            self.note("unwritten", f"{what} uses what is not computed yet", at)
            layout = cell.layout
            return spoil(torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="cpu"))
        return cell.values

    def pinned(self, nbytes: int) -> Tensor:
        buffer = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    # Time

    def execute(self, step: Callable[[], None]) -> None:
        """After an error nothing more is done, and whoever waits hears of it."""
        if self._error is None:
            try:
                with torch.inference_mode():
                    step()
            except Exception as error:
                self._error = error

    def finish(self, event: LateEvent) -> None:
        """Let time pass until this event has; raises what an asynchronous error of a device raises."""
        while not event.is_behind():
            with self.lock:
                self._next(event.stream).execute(1)
        if self._error is not None:
            raise torch.AcceleratorError(f"an enqueued operation failed: {self._error!r}") from self._error

    def pass_time(self, asked: bool = False) -> None:
        """Do a few steps, or none."""
        if self._draws is None:
            return
        with self.lock:
            for _ in range(self._draws.choice([0, 1, 10, 1000] if asked else [0] * 20 + [1])):
                if not any(stream.ready() for stream in self.streams):
                    break
                self._next(self._turn).execute(1)

    def _next(self, wanted: LateStream) -> LateStream:
        """The stream whose turn it is: without a seed `wanted`, or what that waits for."""
        if self._draws is None:
            while (held := wanted.waits_for()) is not None:
                wanted = held.stream
            return wanted
        if not self._turn.ready() or self._draws.random() > self._patience:
            self._turn = self._draws.choice([stream for stream in self.streams if stream.ready()])
        return self._turn

    def _active(self) -> list[LateStream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        found: list[LateStream] = self._local.streams
        return found
