"""The model's forward pass, compiled layer by layer if there is a C++ compiler."""

import shutil
import threading
import warnings
from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor

from scripts.demo.model import DemoModel


def forward_of(model: DemoModel, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Return the forward pass. If `compiled` and there is a C++ compiler, layers are compiled on first use.

    The compiled code is for all lengths of chats.
    """
    if not compiled or not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return model
    # Without a GPU, torch warns when it compiles.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    configured = threading.local()

    def forward(ids: Tensor) -> Tensor:
        if not hasattr(configured, "done"):
            configured.done = configure()
        logits: Tensor = model(ids)
        return logits

    return forward


def configure() -> bool:
    """Set up torch.compile for the current thread, because its settings are per thread."""
    # Code that cannot be compiled runs uncompiled, instead of raising.
    torch._dynamo.config.suppress_errors = True
    # All layers share one code object, and each layer needs versions for one row, one chunk and any size. The default
    # limit would be too low.
    torch._dynamo.config.recompile_limit = 128
    return True
