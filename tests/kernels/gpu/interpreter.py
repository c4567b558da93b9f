"""Importing this puts Triton's interpreter under the kernels of this process, but not of the processes it starts."""

import os
from importlib import import_module
from pathlib import Path

from baton import kernels

# Imported without the interpreter's setting: operations on CPU tensors are not sent to Triton in the whole process.
import_module("baton.kernels.runtime.triton.selection")
os.environ["TRITON_INTERPRET"] = "1"
import_module("triton.experimental.gluon")  # The interpreter would import it at the first launch, without the setting.
FOLDER = Path(kernels.__path__[0])
for file in sorted(FOLDER.rglob("triton*.py")):
    import_module(f"baton.kernels.{'.'.join(file.relative_to(FOLDER).with_suffix('').parts)}")
del os.environ["TRITON_INTERPRET"]
