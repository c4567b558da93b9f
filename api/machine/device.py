"""The device that computes: its choice, the memory that pools may take on it, and its warm-up."""

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
"""The part of a GPU's free memory that pools may take. The rest covers what is not measured, such as fragmentation."""
SLOTS_TO_WARM = 6  # slots of the small pool on which steps run to measure their memory


def pick_device(name: str) -> torch.device:
    """Return the device of this name; "auto" means a GPU if there is one. Raises ValueError without a CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ValueError("--device: this machine has no CUDA device")
    device = torch.device(name)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def can_capture(model: Model, device: torch.device) -> bool:
    """Return whether decoding steps can be captured: Triton computes, and the model is not the hash model."""
    return triton.computes_on(device) and not isinstance(model, HashModel)


def stream_of(device: torch.device, model: Model) -> Stream:
    """Wait for everything enqueued on the device so far. Return the stream for steps."""
    if device.type != "cuda":
        return CpuStream()
    torch.cuda.synchronize(device)
    return CudaStream(device, can_capture(model, device))


def allocate_pools(model: Model, slots: int, pages: int, page_size: int, device: torch.device, stream: Stream) -> Pools:
    """Allocate the pools of states and pages.

    Where steps are captured, the pools get one more slot and page outside the ledger, which rows of padding use.
    """
    padding = int(stream.can_capture)
    pools = allocate(model, slots + padding, pages + padding * bool(pages), page_size, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pools


def make_device(
    model: Model, pools: Pools, max_running: int, max_model_len: int, host: HostStates, stream: Stream, longest: int
) -> TorchDevice:
    """Make the device, warmed up: all kernels are compiled and all graphs captured, so that no request waits for that.

    longest: maximum prompt tokens in a step.
    """
    device = TorchDevice(model, pools, max_running, max_model_len, host, stream)
    if stream.can_capture:
        device.capture()
        warm_up(device, min(longest, max_model_len - 2))
    return device


def pool_memory(
    model: Model, max_running: int, max_model_len: int, page_size: int, longest: int, stream: Stream
) -> int:
    """Return how many bytes the pools of states and pages may take.

    On a GPU this is the free memory minus the memory of steps, which is measured by running steps on a small pool.
    """
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
    steps_bytes = before - free_memory(device) - pools.nbytes
    del trial, pools
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int((free_memory(device) - steps_bytes) * GPU_FRACTION)
