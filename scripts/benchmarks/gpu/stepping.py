"""A model on the server's TorchDevice, run without the server."""

import time
from collections import deque

import torch

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.launching import Pending
from baton.actors.forward.streams import CpuStream, Stream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.messages import Ran
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack
from baton.api.machine.device import allocate_pools
from baton.models.batch import Model

PAGE = 16
STEP_TOKENS = 8192
IN_FLIGHT = 2
GREEDY = Sampling(temperature=0.0)


def stream_of(device: torch.device) -> Stream:
    if device.type != "cuda":
        return CpuStream()
    from baton.actors.forward.cuda_stream import CudaStream

    return CudaStream(torch.device("cuda", device.index or 0))


class Stepping:
    """Rows of up to `length` tokens that decode together. Each step is launched before the previous one has ended."""

    def __init__(self, model: Model, rows: int, length: int, device: torch.device) -> None:
        stream = stream_of(device)
        self._rows, self._vocabulary = rows, model.vocab_size
        self._pages = -(-(length + 1) // PAGE) if model.kv_specs() else 0
        pools = allocate_pools(model, rows, rows * self._pages, PAGE, device, stream)
        self._device = TorchDevice(model, pools, rows, length, stream=stream)
        self._device.capture()
        self._steps = self._position = 0

    def read(self, tokens: int) -> float:
        """Read a prompt of `tokens` tokens in one row, and return the device's seconds."""
        self._open(0, tokens)
        return self._launch([WorkChunk(0, 0, tokens, True)], []).collect().seconds

    def begin(self, tokens: int) -> None:
        """Reset every row and read its prompt; then all rows are ready to decode."""
        at_once = max(1, STEP_TOKENS // tokens)
        for row in range(self._rows):
            self._open(row, tokens)
        for first in range(0, self._rows, at_once):
            rows = range(first, min(first + at_once, self._rows))
            self._launch([WorkChunk(row, 0, tokens, True) for row in rows], []).collect()
        self._position = tokens

    def decode(self, steps: int) -> tuple[list[float], list[float]]:
        """Decode `steps` steps. Return the seconds of each step's launch, and the device's seconds of each step."""
        launching, running, in_flight = list[float](), list[float](), deque[Pending[Ran]]()
        for _ in range(steps):
            began = time.perf_counter()
            in_flight.append(self._launch([], list(range(self._rows))))
            launching.append(time.perf_counter() - began)
            self._position += 1
            if len(in_flight) == IN_FLIGHT:
                running.append(in_flight.popleft().collect().seconds)
        running += [pending.collect().seconds for pending in in_flight]
        return launching, running

    def _open(self, row: int, tokens: int) -> None:
        ids = pack((7 * row + 3 * i * i + 1) % self._vocabulary for i in range(tokens))
        request = Request("bench", ids, tokens, GREEDY, Stops(1_000_000))
        self._device.clear(row)
        self._device.open_row(row, row, row, request, list(range(row * self._pages, (row + 1) * self._pages)))

    def _launch(self, chunks: list[WorkChunk], decodes: list[int]) -> Pending[Ran]:
        self._steps += 1
        return self._device.launch(Work(self._steps, chunks, decodes, [self._position] * len(decodes), []))
