"""What tensors are called in C."""

import ctypes

import torch

POINTER = ctypes.c_void_p
INT = ctypes.c_int
INT64 = ctypes.c_int64
FLOAT = ctypes.c_float

# The numbers of numbers.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
