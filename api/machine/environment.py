"""Environment variables that torch reads when it is imported. Call these functions before that."""

import os
from collections.abc import MutableMapping

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expand_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's allocator of GPU memory grow its segments, unless the user has set how it allocates.

    Prompts of ever new lengths would otherwise fragment the memory that the pools leave, until an allocation fails
    although enough is free, and all cached blocks are given back while the device waits.
    """
    if not any(name in environment for name in ALLOCATOR_SETTINGS):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
