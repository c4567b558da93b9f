"""Builders of operations (see operation.Operation) for all Triton kernels, at the sizes of real models."""
