"""An operation: a Triton kernel on random inputs, its reference on the same inputs, and a lower bound of its cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Tolerated relative error: norm of the difference, divided by the norm of the expected values.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
# Tolerated share of integers (drawn tokens, ranks) that differ: rounding can change some of them.
DIFFERENT = 0.01


@dataclass(frozen=True)
class Operation:
    """A kernel, its reference and inputs for both. Each returns its results, and the inputs that it has written to."""

    run: Callable[..., Sequence[Tensor]]  # calls the Triton kernel
    exact: Callable[..., Sequence[Tensor]]  # calls the reference, which gets float32 inputs
    inputs: tuple[Tensor, ...]  # arguments of `run` and `exact`, which may write to some of them
    nbytes: int  # lower bound of the bytes read and written
    flops: int = 0  # lower bound of the floating-point operations of matrix products

    def floor(self, bandwidth: float, rate: float) -> float:
        """Return the lower bound of the time in seconds. bandwidth: bytes per second. rate: operations per second."""
        return max(self.nbytes / bandwidth, self.flops / rate)

    def error(self, dtype: torch.dtype) -> float:
        """Return the kernel's error relative to the tolerance for activations of `dtype`: more than 1 is wrong."""
        expected = self.exact(*map(copied, self.inputs))
        found = poisoned(lambda: self.run(*self.inputs))
        return max(difference(one.cpu(), other, dtype) for one, other in zip(found, expected, strict=True))


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU; floats become float32."""
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def poisoned(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Run with uninitialized memory filled with NaN or the largest integer, so that values never written show up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # torch adds this attribute to the module at run time, by a property of the module's class.
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the error of `found`, relative to the tolerance; infinite for NaN and for a wrong shape.

    dtype: type of the activations, which determines the tolerance unless `found` is bfloat16.
    """
    if found.shape != expected.shape:
        return float("inf")
    if not found.is_floating_point():
        return float((found != expected).double().mean()) / DIFFERENT
    left, right = found.double(), expected.double()
    errors = (left - right).masked_fill(left == right, 0.0)  # -inf - -inf would be NaN
    norm = errors.norm() / right[right.isfinite()].norm().clamp(min=1e-30)
    return (
        float(norm) / TOLERANCES[found.dtype if found.dtype == torch.bfloat16 else dtype]
        if norm.isfinite()
        else float("inf")
    )


class Draw:
    """A source of random inputs on a device, drawn from a seed. `dtype` is the type of activations."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return uniform float32 numbers."""
        return torch.rand(*shape, generator=self._generator, device=self.device) * (high - low) + low

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
