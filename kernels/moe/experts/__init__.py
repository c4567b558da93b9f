"""Feed-forward experts, a few per token: in Triton or native code where they apply, else in torch."""

from torch import Tensor

from baton.kernels.moe.experts import cpu, native
from baton.kernels.moe.experts.packed import PackedExperts, keep, pack
from baton.kernels.moe.experts.reference import PARTS, Activation
from baton.kernels.runtime.triton import takes

__all__ = ["PARTS", "Activation", "PackedExperts", "experts", "keep", "pack"]


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    input_linear: Tensor | PackedExperts,
    output_linear: Tensor | PackedExperts,
    activation: Activation,
) -> Tensor:
    """Compute reference.experts with the fastest form. Each weight is a plain tensor or packed by `pack`."""
    if native.takes(x, input_linear, output_linear):
        assert isinstance(input_linear, PackedExperts) and isinstance(output_linear, PackedExperts)
        return native.experts(x, chosen, weights, input_linear, output_linear, activation)
    if takes(x):
        from baton.kernels.moe.experts import triton

        return triton.experts(x, chosen, weights, input_linear, output_linear, activation)
    return cpu.experts(x, chosen, weights, input_linear, output_linear, activation)
