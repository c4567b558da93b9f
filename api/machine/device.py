"""The device that computes: which one, how much of its memory pools may take, and its steps made ready."""

import torch

from baton.actors.forward.cuda_stream import CudaStream
from baton.actors.forward.streams import CpuStream, Stream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import pages_to_warm, warm_up
from baton.actors.runtime.sizing import DEFAULT_MEMORY_FRACTION
from baton.actors.storage.host_memory import HostStates
from baton.api.machine.memory import free_memory
from baton.kernels.runtime import triton
from baton.models.batch import Model, Pools, allocate
from baton.models.hash import HashModel

GPU_FRACTION = 0.95
"""Of what is free on a GPU; the rest is for what nobody measures, such as fragments."""
SLOTS_TO_WARM = 6


def pick_device(name: str) -> torch.device:
    """auto: a GPU if there is one. ValueError if it is asked for and not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ValueError("--device: there is no CUDA device here")
    device = torch.device(name)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def can_capture(model: Model, device: torch.device) -> bool:
    """Whether decoding steps can be recorded: where Triton computes, but none of the hash model, which reads states."""
    return triton.computes_on(device) and not isinstance(model, HashModel)


def stream_of(device: torch.device, model: Model) -> Stream:
    """The one stream of the device, behind all that has been enqueued before."""
    if device.type != "cuda":
        return CpuStream()
    torch.cuda.synchronize(device)
    return CudaStream(device, can_capture(model, device))


def allocate_pools(model: Model, slots: int, pages: int, page_size: int, device: torch.device, stream: Stream) -> Pools:
    """Where steps are captured there is one more slot than the ledger knows, and one more page, for rows of padding."""
    more = int(stream.can_capture)
    pools = allocate(model, slots + more, pages + more * bool(pages), page_size, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pools


def make_device(
    model: Model, pools: Pools, max_running: int, max_model_len: int, host: HostStates, stream: Stream, longest: int
) -> TorchDevice:
    """longest: most prompt tokens of a step. What compiles at first use, or is captured, is so when it returns."""
    device = TorchDevice(model, pools, max_running, max_model_len, host, stream)
    if stream.can_capture:
        device.capture()
        warm_up(device, min(longest, max_model_len - 2))
    return device


def pool_memory(
    model: Model, max_running: int, max_model_len: int, page_size: int, longest: int, stream: Stream
) -> int:
    """Bytes for states and pages. On a GPU: what is free, less what steps take, which is measured by running some."""
    device = stream.device
    if device.type != "cuda":
        return int(free_memory(device) * DEFAULT_MEMORY_FRACTION)
    before = free_memory(device)
    longest = min(longest, max_model_len - 2)
    pages = pages_to_warm(longest, page_size) if model.kv_specs() else 0
    pools = allocate_pools(model, SLOTS_TO_WARM, pages, page_size, device, stream)
    trial = TorchDevice(model, pools, max_running, max_model_len, stream=stream)
    trial.capture(only_largest=True)
    warm_up(trial, longest)
    taken = before - free_memory(device) - pools.nbytes
    del trial, pools
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int((free_memory(device) - taken) * GPU_FRACTION)
