"""Importing this brings Triton's kernels in its interpreter into this process; those that it starts decide anew."""

import os
from importlib import import_module
from pathlib import Path

from baton import kernels

os.environ["TRITON_INTERPRET"] = "1"
import_module("triton.experimental.gluon")  # Which the interpreter imports at the first launch.
for file in sorted(Path(kernels.__path__[0]).glob("*/triton*.py")):
    import_module(f"baton.kernels.{file.parent.name}.{file.stem}")
del os.environ["TRITON_INTERPRET"]
