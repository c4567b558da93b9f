"""Importing this module makes Triton interpret the kernels of this process, but not those of processes it starts."""

import os
from importlib import import_module
from pathlib import Path

from baton import kernels

# Imported without the interpreter's setting, so that CPU tensors are not sent to Triton in the whole process.
import_module("baton.kernels.runtime.triton.selection")
os.environ["TRITON_INTERPRET"] = "1"
# Otherwise the interpreter would import this at the first launch, without the setting.
import_module("triton.experimental.gluon")
FOLDER = Path(kernels.__path__[0])
for file in sorted(FOLDER.rglob("triton*.py")):
    import_module(f"baton.kernels.{'.'.join(file.relative_to(FOLDER).with_suffix('').parts)}")
del os.environ["TRITON_INTERPRET"]
