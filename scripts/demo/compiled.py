"""The model's forward pass, compiled a layer at a time where there is a compiler."""

import shutil
import warnings
from collections.abc import Callable

from torch import Tensor

from scripts.demo.model import DemoModel


def forward_of(model: DemoModel, compiled: bool) -> Callable[[Tensor], Tensor]:
    """The model, whose layers are compiled at their first use for all lengths; as it is without a C++ compiler."""
    if not compiled or not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return model
    # Without a GPU torch says so to whoever compiles.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    return model
