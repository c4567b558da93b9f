"""C types of native functions' arguments, and the numbers of tensor dtypes."""

import ctypes

import torch

POINTER = ctypes.c_void_p
INT = ctypes.c_int
INT64 = ctypes.c_int64
FLOAT = ctypes.c_float

# Numbers of dtypes, as in the enum Type of numbers.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
