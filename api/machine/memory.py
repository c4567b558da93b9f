"""How much memory there is to be had."""

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the device, or of this machine within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = read_text("/proc/meminfo").split()
    if "MemAvailable:" in meminfo:
        available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    limit = read_text("/sys/fs/cgroup/memory.max").strip()
    used = read_text("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def read_text(path: str) -> str:
    """A small file of the system; empty where there is none."""
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
