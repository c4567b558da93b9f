"""Free memory of a device, and the check that a model fits into it."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

CONTAINER = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of this machine within the limit of its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = read_text(Path("/proc/meminfo")).split()
    if "MemAvailable:" in meminfo:
        available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    return min(available, free_in_container(CONTAINER, available))


def free_in_container(folder: Path, otherwise: int) -> int:
    """Return the free bytes within the memory limit of a control group, or `otherwise` if the group sets no limit.

    The group counts its page cache as used. The kernel reclaims page cache on demand, so it counts as free here.
    """
    limit, used = (read_text(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return otherwise
    lines = (line.split() for line in read_text(folder / "memory.stat").splitlines())
    files = sum(int(count) for name, count in lines if name in ("active_file", "inactive_file"))
    return int(limit) - int(used) + min(files, int(used))


def check_room(weights: int, device: torch.device) -> None:
    """Raise ValueError if weights, in bytes, do not fit into free memory. Call this before they are loaded."""
    free = free_memory(device)
    if weights > free:
        raise ValueError(f"the weights take {bytes_of(weights)}, but only {bytes_of(free)} are free")


def bytes_of(count: int) -> str:
    """Return a number of bytes in the largest unit that is not larger than the number, such as 1.5 GiB."""
    units: Sequence[tuple[str, int]] = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((f"{count / unit:.1f} {name}" for name, unit in units if count >= unit), f"{count} B")


def read_text(path: Path) -> str:
    """Return the text of a system file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
