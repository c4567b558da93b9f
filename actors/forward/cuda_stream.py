"""A stream of a CUDA device, and its events."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakSet

import torch
from torch import Tensor

from baton.actors.forward.streams import Event, Stream


class CudaEvent:
    """A streams.Event on CUDA. A thread that waits for the event sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.native = torch.cuda.Event(enable_timing=True, blocking=True)
        self.native.record(stream)

    def wait(self) -> None:
        self.native.synchronize()

    def seconds_since(self, earlier: "Event") -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.native.elapsed_time(self.native)) / 1000

    def passed(self) -> bool:
        return bool(self.native.query())


class CudaStream:
    """A streams.Stream on CUDA.

    device: the CUDA device, with its index.
    can_capture: False if a decoding step reads results back from the device, which a graph cannot contain.
    """

    def __init__(self, device: torch.device, can_capture: bool = True) -> None:
        self.device, self.can_capture = device, can_capture
        self._stream = torch.cuda.Stream(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def enter_thread(self) -> None:
        """Select the device: torch does so by thread, and would also create a context on the first GPU otherwise."""
        torch.cuda.set_device(self.device)

    def active(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def host_buffer(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor, device: Tensor) -> None:
        with self.active():
            device.copy_(host, non_blocking=True)
        self._uses(device)

    def download(self, device: Tensor, host: Tensor) -> None:
        with self.active():
            host.copy_(device, non_blocking=True)
        self._uses(device)

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.native)

    def beside(self) -> Stream:
        return CudaStream(self.device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture as streams.Stream describes. Waits for the device; other threads may use CUDA meanwhile."""
        if not self._graphs:  # CUDA refuses a memory pool after all its graphs are gone.
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._stream, capture_error_mode="thread_local"):
            run()

        def replay() -> None:
            with self.active():
                graph.replay()

        return replay

    def _uses(self, tensor: Tensor) -> None:
        """Keep the allocator from reusing the memory of another stream's tensor before this stream is done with it."""
        tensor.record_stream(self._stream)
