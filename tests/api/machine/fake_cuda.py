"""A CUDA that looks usable and computes nothing: what torch.cuda answers, and the calls that were made to it."""

import threading
from types import SimpleNamespace

import pytest
import torch

GIB = 2**30


class FakeCuda:
    """GPUs of 80 GiB. `locked` are the ranges of host memory that were locked, and `entered` the devices by thread."""

    def __init__(self, gpus: int = 2, refuse_after: int | None = None) -> None:
        self.gpus, self.refuse_after = gpus, refuse_after
        self.locked: list[tuple[int, int]] = []
        self.entered: dict[str, torch.device] = {}
        self.not_entered: list[str] = []  # threads that locked memory before they had entered a device
        self._changing = threading.Lock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: self.gpus,
            "current_device": lambda: 0,
            "set_device": self.set_device,
            "get_device_name": lambda device: "NVIDIA H100",
            "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
            "mem_get_info": lambda device: (70 * GIB, 80 * GIB),
            "cudart": lambda: self,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        return self

    def set_device(self, device: torch.device) -> None:
        self.entered[threading.current_thread().name] = device

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        with self._changing:
            if threading.current_thread().name not in self.entered:
                self.not_entered.append(threading.current_thread().name)
            if self.refuse_after is not None and len(self.locked) >= self.refuse_after:
                return 2
            self.locked.append((address, address + nbytes))
            return 0
