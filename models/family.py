"""What a family gives to the loader."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.batch import Model
from models.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """build: with the types of its weights and of its recurrent states; a model whose parameters, if any, are empty. It
    runs under the meta device.

    rename: the parameter that a checkpoint's tensor fills; None for one that is left out.
    embedding: the name of the parameter that a tied head repeats.
    """

    build: Callable[[ModelConfig, torch.dtype, torch.dtype], Model]
    rename: Callable[[str], str | None]
    embedding: str
