"""The dtype in which a checkpoint's weights are loaded unless another one is requested."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from baton.models.config import ModelConfig, ModelError
from baton.models.gguf.blocks import BLOCKS
from baton.models.loading.formats.composed import FLOATS
from baton.models.loading.shards import StoredTensor, find_shards, read_headers


def checkpoint_dtype(path: Path, config: ModelConfig) -> torch.dtype:
    """Return the dtype of the checkpoint in folder `path`, see dtype_of.

    The headers of the weight files are read only if config.json names no dtype.
    """
    stored: list[StoredTensor] = []
    if config.dtype() is None:
        with suppress(ModelError):  # Files that cannot be read are reported when they are loaded.
            stored = read_headers(find_shards(path))
    return dtype_of(config, stored)


def dtype_of(config: ModelConfig, stored: Sequence[StoredTensor]) -> torch.dtype:
    """Return the dtype that config.json names, else that of most bytes of the files.

    It is bfloat16 if they are bfloat16 or in one of GGUF's block formats, else float32, which holds the values of all
    other dtypes exactly. FP8 tensors and integers do not count.
    """
    sizes = Counter[str]()
    for tensor in stored:
        sizes[tensor.dtype] += (tensor.stop - tensor.start) * (tensor.dtype in FLOATS or tensor.dtype in BLOCKS)
    commonest = max(sizes, key=sizes.__getitem__, default="F32")
    return config.dtype() or (torch.bfloat16 if commonest == "BF16" or commonest in BLOCKS else torch.float32)
