"""A call of a Triton kernel on drawn inputs, the same by its reference, and the least that it can cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of a relative norm: what float32 is kept to, and bfloat16 between one operation and the next.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
# Of whole numbers that are drawn or ranked: how many may differ, where rounding decides.
DIFFERENT = 0.01


@dataclass(frozen=True)
class Operation:
    """run, by Triton, and exact, by the reference in float32, return what they computed and what they wrote.

    inputs: their arguments, some of which they write. nbytes: to be moved at least; flops: of products, at least.
    """

    run: Callable[..., Sequence[Tensor]]
    exact: Callable[..., Sequence[Tensor]]
    inputs: tuple[Tensor, ...]
    nbytes: int
    flops: int = 0

    def floor(self, bandwidth: float, rate: float) -> float:
        """Seconds, where memory moves so many bytes a second and products take so many operations a second."""
        return max(self.nbytes / bandwidth, self.flops / rate)

    def error(self, dtype: torch.dtype) -> float:
        """Of what Triton computes, in terms of what is tolerated: more than 1 is wrong. dtype: of the activations."""
        expected = self.exact(*map(copied, self.inputs))
        found = poisoned(lambda: self.run(*self.inputs))
        return max(difference(one.cpu(), other, dtype) for one, other in zip(found, expected, strict=True))


def copied(tensor: Tensor) -> Tensor:
    """On a CPU, float32 if it is no integer."""
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def poisoned(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """What is not written is NaN, or the largest number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """In terms of what is tolerated, of bfloat16 also where only what was found is; infinite for NaN."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.is_floating_point():
        return float((found != expected).double().mean()) / DIFFERENT
    given, sought = found.double(), expected.double()
    apart = (given - sought).masked_fill(given == sought, 0.0)  # So that -inf is -inf.
    norm = apart.norm() / sought[sought.isfinite()].norm().clamp(min=1e-30)
    return (
        float(norm) / TOLERANCES[found.dtype if found.dtype == torch.bfloat16 else dtype]
        if norm.isfinite()
        else float("inf")
    )


class Draw:
    """Random inputs on a device, from a seed. dtype: of activations."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """float32."""
        return torch.rand(*shape, generator=self._generator, device=self.device) * (high - low) + low

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
