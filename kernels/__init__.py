"""Operations, one folder each.

reference.py defines an operation in torch. `__init__` chooses the form of the operation that runs: the reference
itself, a faster form in torch (cpu.py), compiled C++ (native.py) or Triton (triton.py).
"""
