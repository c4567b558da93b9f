"""Importing this module makes Triton interpret the kernels of this process, but not those of processes it starts."""

import os
from importlib import import_module
from pathlib import Path

from baton import kernels

# Import `selection` before TRITON_INTERPRET is set: otherwise this process would send all CPU tensors to Triton.
import_module("baton.kernels.runtime.triton.selection")
os.environ["TRITON_INTERPRET"] = "1"
# Import gluon while TRITON_INTERPRET is set; otherwise the first launch would import it without the variable.
import_module("triton.experimental.gluon")
FOLDER = Path(kernels.__path__[0])
for file in sorted(FOLDER.rglob("triton*.py")):
    import_module(f"baton.kernels.{'.'.join(file.relative_to(FOLDER).with_suffix('').parts)}")
del os.environ["TRITON_INTERPRET"]
import_module("tests.kernels.gpu.quick_interpreter").make_quick()
