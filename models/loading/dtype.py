"""The dtype that a checkpoint's weights are loaded in unless another is asked for."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from baton.models.config import ModelConfig, ModelError
from baton.models.loading.quantization import FP8
from baton.models.loading.shards import StoredTensor, find_shards, read_headers


def checkpoint_dtype(path: Path, config: ModelConfig) -> torch.dtype:
    """See dtype_of; headers of the folder's files are read only where config.json names no dtype."""
    stored: list[StoredTensor] = []
    if config.dtype() is None:
        with suppress(ModelError):  # Of files that cannot be read who loads them tells.
            stored = read_headers(find_shards(path))
    return dtype_of(config, stored)


def dtype_of(config: ModelConfig, stored: Sequence[StoredTensor]) -> torch.dtype:
    """What config.json names, else what most bytes of the files are but FP8; float32 where only that is exact."""
    sizes = Counter[str]()
    for tensor in stored:
        sizes[tensor.dtype] += (tensor.stop - tensor.start) * (tensor.dtype != FP8)
    commonest = max(sizes, key=sizes.__getitem__, default="F32")
    return config.dtype() or (torch.bfloat16 if commonest == "BF16" else torch.float32)
