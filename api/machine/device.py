"""The device that computes: its choice, the memory that pools may take on it, and its warm-up."""

import structlog
import torch

from baton.actors.forward.cuda_stream import CudaStream
from baton.actors.forward.streams import CpuStream, Stream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import pages_to_warm, warm_up
from baton.actors.runtime.sizing import DEFAULT_MEMORY_FRACTION
from baton.actors.storage.host_memory import HostStates
from baton.api.machine.gpu import describe_gpu, driver_version, missing_gpu
from baton.api.machine.memory import free_memory
from baton.kernels.runtime import triton
from baton.models.batch import Model, Pools, allocate
from baton.models.hash import HashModel

SLACK, LEAST_SLACK = 0.05, 2**30
"""The part of a GPU's free memory that pools leave, and the least bytes of it.

It covers what is not measured: all sizes of graphs, log probabilities of many prompts at once, fragmentation.
"""
SLOTS_TO_WARM = 6  # slots of the small pool on which steps run to measure their memory


def pick_device(name: str) -> torch.device:
    """Return the device of this name; "auto" means a GPU if there is one. Raises ValueError if there is no such GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ValueError(f"--device: there is no GPU to use: {missing_gpu() or 'torch and this machine have none'}")
    device = torch.device(name)
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"--device: there is no {name}; the last GPU is cuda:{torch.cuda.device_count() - 1}")
    return device


def enter_device(name: str) -> torch.device:
    """Return the device of this name, which the calling thread uses from now on, and log which GPU it is.

    If a GPU should be there and cannot be used, "auto" means the CPU. That is logged as a warning, because answers take
    many times as long.
    """
    device, log = pick_device(name), structlog.get_logger()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        log.info("GPU", gpu=describe_gpu(device), driver=driver_version(), cuda=torch.version.cuda)
    elif name == "auto" and (why := missing_gpu()):
        log.warning("no GPU is used", why=why, cost="the CPU computes; --device cpu says that this is meant")
    return device


def can_capture(model: Model, device: torch.device) -> bool:
    """Return whether decoding steps can be captured: Triton computes, and the model is not the hash model."""
    return triton.computes_on(device) and not isinstance(model, HashModel)


def stream_of(device: torch.device, model: Model) -> Stream:
    """Wait for everything enqueued on the device so far. Return the stream for steps."""
    if device.type != "cuda":
        return CpuStream()
    torch.cuda.synchronize(device)
    return CudaStream(device, can_capture(model, device))


def allocate_pools(
    model: Model,
    slots: int,
    pages: int,
    page_size: int,
    device: torch.device,
    stream: Stream,
    rows: int = 0,
    drafts: int = 0,
) -> Pools:
    """Allocate the pools of states and pages, and the rings of drafts.

    Where steps are captured, the pools get one more slot, page and ring outside the ledger, which padding uses.
    """
    padding = int(stream.can_capture)
    numbers = slots + padding, pages + padding * bool(pages), page_size
    pools = allocate(model, *numbers, device, rows + padding * bool(drafts), drafts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pools


def ring_bytes(model: Model, rows: int, drafts: int) -> int:
    """Return the bytes of the rings for `drafts` drafts of each row."""
    return rows * drafts * sum(spec.nbytes for spec in model.ring_specs())


def make_device(
    model: Model,
    pools: Pools,
    max_running: int,
    max_model_len: int,
    host: HostStates,
    stream: Stream,
    longest: int,
) -> TorchDevice:
    """Make the device, warmed up: all kernels are compiled and all graphs captured, so that no request waits for that.

    longest: maximum prompt tokens in a step.
    """
    device = TorchDevice(model, pools, max_running, max_model_len, host, stream)
    if stream.can_capture:
        device.capture()
        warm_up(device, min(longest, max_model_len - 2), longest)
    return device


def pool_memory(
    model: Model,
    max_running: int,
    max_model_len: int,
    page_size: int,
    longest: int,
    stream: Stream,
    host: HostStates | None = None,
    drafts: int = 0,
) -> int:
    """Return how many bytes the pools of states and pages may take, without the rings of drafts.

    On a GPU this is the free memory minus the memory of steps, which is measured by running steps on a small pool.
    """
    device = stream.device
    if device.type != "cuda":
        return int(free_memory(device) * DEFAULT_MEMORY_FRACTION) - ring_bytes(model, max_running, drafts)
    before = free_memory(device)
    step_tokens, longest = longest, min(longest, max_model_len - 2)
    pages = pages_to_warm(longest, page_size) if model.kv_specs() else 0
    pools = allocate_pools(model, SLOTS_TO_WARM, pages, page_size, device, stream, max_running, drafts)
    trial = TorchDevice(model, pools, max_running, max_model_len, host, stream)
    trial.capture(only_largest=True)
    warm_up(trial, longest, step_tokens)
    steps_bytes = before - free_memory(device) - pools.nbytes  # the rings too
    del trial, pools
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return gpu_share(free_memory(device) - steps_bytes)


def gpu_share(free: int) -> int:
    """Return how many of a GPU's free bytes the pools may take."""
    return max(free - max(int(free * SLACK), LEAST_SLACK), 0)
