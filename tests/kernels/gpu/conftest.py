import tests.kernels.gpu.interpreter  # noqa: F401
