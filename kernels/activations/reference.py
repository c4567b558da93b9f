"""Activations between the two projections of a feed-forward layer, and the sigmoid gate of a layer's output."""

from torch import Tensor
from torch.nn import functional as F


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return σ(gate)·x in x's dtype, computed in float32.

    x: [T, n]. gate: [T, g], where g divides n. Each gate multiplies n / g numbers of x that follow one another.
    """
    parts = x.float().reshape(*gate.shape, x.shape[1] // gate.shape[1])
    return (gate.float().sigmoid()[:, :, None] * parts).flatten(1).to(x.dtype)


def silu_multiply(x: Tensor) -> Tensor:
    """Return silu(gate)·up [T, n] in x's dtype, computed in float32 (SwiGLU: Shazeer, 2020, arXiv:2002.05202).

    x: [T, 2n], the columns of gate followed by those of up.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)² in x's dtype, computed in float32 (So et al., 2021, arXiv:2109.08668)."""
    return F.relu(x.float()).square().to(x.dtype)
