"""For which tensors Triton computes."""

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
    """Whether Triton computes where this tensor lies: on a GPU and, in its interpreter, on a CPU."""
    # Every operation asks this first: naming a device takes longer than this property.
    return (CPU if tensor.is_cpu else tensor.device.type) in _device_types


def leave_to_torch() -> None:
    """From now on Triton computes nowhere."""
    _device_types.clear()


def computes_on(device: torch.device) -> bool:
    """Whether Triton does."""
    return device.type in _device_types


@contextmanager
def computes_for(device_type: str) -> Iterator[None]:
    """Meanwhile Triton computes for one more type of device; for tests."""
    before = set(_device_types)
    _device_types.add(device_type)
    try:
        yield
    finally:
        _device_types.intersection_update(before)
