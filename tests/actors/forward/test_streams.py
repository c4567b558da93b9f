"""The contract of every stream: a CPU's, the late device's and, if there is one, CUDA's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from torch import Tensor

from baton.actors.forward.cuda_stream import CudaStream
from baton.actors.forward.streams import CpuStream, Stream
from tests.late import LateDevice

Maker = Callable[[], Stream]
KINDS = ["cpu", "late", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=KINDS)
def stream_of(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Yield a function that makes streams of one device."""
    if request.param == "late":
        with LateDevice(seed=0) as late:
            yield late.stream
    elif request.param == "cuda":
        yield lambda: CudaStream(torch.device("cuda", 0))
    else:
        yield CpuStream


def floats(stream: Stream, *values: float) -> Tensor:
    """Return a host buffer with these values."""
    buffer = stream.host_buffer(4 * len(values)).view(torch.float32)
    buffer.copy_(torch.tensor(values))
    return buffer


def test_enqueued_work_is_executed_in_order(stream_of: Maker) -> None:
    stream = stream_of()
    host, result = floats(stream, 1, 2, 3), floats(stream, 0, 0, 0)
    with stream.active():
        x = torch.empty(3, device=stream.device)
        stream.upload(host, x)
        x.mul_(2)
        stream.download(x, result)
        x.zero_()
    event = stream.record()
    event.wait()
    assert event.passed() and result.tolist() == [2, 4, 6]


def test_a_stream_waits_for_anothers_event(stream_of: Maker) -> None:
    forward, copies = stream_of(), stream_of()
    result = floats(copies, *[0.0] * 1000)
    with forward.active():
        x = torch.zeros(1000, device=forward.device)
        for _ in range(100):
            x.add_(1)
    copies.wait(forward.record())
    copies.download(x, result)
    forward.wait(copies.record())
    with forward.active():
        x.fill_(-1)
    forward.record().wait()
    assert result.tolist() == [100] * 1000


def test_a_replay_repeats_the_captured_work(stream_of: Maker) -> None:
    stream = stream_of()
    host, result = floats(stream, 1, 2), floats(stream, 0, 0)
    with stream.active():
        source, total = torch.zeros(2, device=stream.device), torch.zeros(2, device=stream.device)

    def step() -> None:
        total.add_(source * 10)

    with stream.active():
        step()
    replay = stream.capture(step)
    for values in ([1.0, 2.0], [3.0, 4.0]):
        host.copy_(torch.tensor(values))
        stream.upload(host, source)
        replay()
        stream.record().wait()
    stream.download(total, result)
    stream.record().wait()
    assert result.tolist() == [40, 60]


def test_host_buffers_are_bytes(stream_of: Maker) -> None:
    stream = stream_of()
    buffer = stream.host_buffer(24)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((24,), torch.uint8, "cpu")
    assert buffer.is_pinned() == (stream.device.type == "cuda")


def test_a_thread_of_cuda_enters_the_streams_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    stream = CudaStream(torch.device("cuda", 1))
    stream.enter_thread()
    stream.beside().enter_thread()
    assert entered == [torch.device("cuda", 1)] * 2


def test_captures_share_a_memory_pool_while_a_graph_of_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA rejects a memory pool whose graphs have all been destroyed, so the next capture takes a new pool."""
    pools = list[int]()

    class Graph:
        pass

    @contextmanager
    def capturing(graph: Graph, pool: int, **_: object) -> Iterator[None]:
        pools.append(pool)
        yield

    fakes = {"Stream": lambda device: None, "CUDAGraph": Graph, "graph": capturing}
    for name, fake in {**fakes, "graph_pool_handle": count().__next__}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    stream = CudaStream(torch.device("cuda", 0))
    replays = [stream.capture(lambda: None) for _ in range(2)]
    replays.clear()
    replays.append(stream.capture(lambda: None))
    assert pools == [0, 0, 1]
