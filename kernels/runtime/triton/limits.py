"""What a GPU's programs may use."""

from functools import cache

import torch

KIB = 1024
LEAST = 99 * KIB


def shared_memory(device: torch.device) -> int:
    """Bytes for one program, as far as is known: what the smallest have for others than the large ones."""
    return _of_gpu(device.index or 0) if device.type == "cuda" else LEAST


@cache
def _of_gpu(index: int) -> int:
    if torch.version.hip:
        return 64 * KIB
    return {(8, 0): 163 * KIB, (9, 0): 227 * KIB, (10, 0): 227 * KIB}.get(
        torch.cuda.get_device_capability(index), LEAST
    )
