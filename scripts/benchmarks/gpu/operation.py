"""An operation: a Triton kernel on random inputs, its reference on the same, and a lower bound of its cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Tolerated relative error, norm of the difference by norm of the expected values.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
# Tolerated share of different integers (drawn tokens, ranks): rounding decides some of them.
DIFFERENT = 0.01


@dataclass(frozen=True)
class Operation:
    """A kernel, its reference and inputs for both. Both return their results and the inputs that they wrote to."""

    run: Callable[..., Sequence[Tensor]]  # by Triton
    exact: Callable[..., Sequence[Tensor]]  # by the reference, in float32
    inputs: tuple[Tensor, ...]  # arguments of both, some of which they write to
    nbytes: int  # lower bound of the bytes moved
    flops: int = 0  # lower bound of the operations of matrix products

    def floor(self, bandwidth: float, rate: float) -> float:
        """Return the lower bound in seconds. bandwidth: bytes per second. rate: operations per second."""
        return max(self.nbytes / bandwidth, self.flops / rate)

    def error(self, dtype: torch.dtype) -> float:
        """Return Triton's error relative to the tolerance for activations of `dtype`: more than 1 is wrong."""
        expected = self.exact(*map(copied, self.inputs))
        found = poisoned(lambda: self.run(*self.inputs))
        return max(difference(one.cpu(), other, dtype) for one, other in zip(found, expected, strict=True))


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU; floats become float32."""
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def poisoned(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Run with uninitialized memory filled with NaN, or the largest integer: values that were never written show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the error relative to the tolerance; infinite for NaN and for a wrong shape.

    dtype: of the activations; the tolerance is that of bfloat16 also if only `found` is bfloat16.
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
    """Draws random inputs on a device from a seed. `dtype` is that of activations."""

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
