"""Selection of the tensors that Triton computes with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
INTERPRETS = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

CPU = "cpu"
_device_types = {"cuda", *(["cpu"] if INTERPRETS else [])} if HAS_TRITON else set[str]()


def takes(tensor: Tensor) -> bool:
    """Return whether Triton computes on this tensor's device: a GPU or, in Triton's interpreter, a CPU."""
    # Every operation calls this first, so it is fast: `is_cpu` takes less time than `device.type`.
    return (CPU if tensor.is_cpu else tensor.device.type) in _device_types


def leave_to_torch() -> None:
    """Disable Triton on all devices."""
    _device_types.clear()


def computes_on(device: torch.device) -> bool:
    """Return whether Triton computes on this device."""
    return device.type in _device_types


@contextmanager
def computes_for(device_type: str) -> Iterator[None]:
    """Let Triton compute on one more type of device; for tests."""
    before = set(_device_types)
    _device_types.add(device_type)
    try:
        yield
    finally:
        _device_types.intersection_update(before)
