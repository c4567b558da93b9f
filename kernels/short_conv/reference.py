"""The gated short convolution of LFM2 (arXiv:2511.23404) between its two projections: C · convolution(B · x).

The convolution is causal and depthwise, without an activation. The layer has no other state than the convolution's last
inputs. Each token is computed in the same way in a prompt and alone.
"""

import torch
from torch import Tensor

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.short_conv.constants import ShortConvConstants


def short_conv_prefill(projected: Tensor, constants: ShortConvConstants, pool: Tensor, plan: PrefillPlan) -> Tensor:
    """Compute packed segments: [T, channels] in the dtype of `projected`; update the pool in place.

    Computed in float32, except that the convolution's inputs are rounded to the dtype of `projected`.

    projected: [T, 3·channels], each token's B, C and x.
    pool: float32 [slots, K-1, channels], the last inputs B·x. Each segment's slot is read as the history before its
        first token and receives the inputs at its end; each checkpoint's slot receives those at its position.
    plan: the segments with their slots and checkpoints.
    """
    gate, inputs = gate_and_inputs(projected)
    y = conv1d.conv1d_prefill(inputs, constants.taps, constants.bias, pool, plan.conv, activate=False)
    return (gate.float() * y).to(projected.dtype)


def short_conv_decode(
    projected: Tensor, constants: ShortConvConstants, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Compute one token of each row: [R, channels] in the dtype of `projected`; update the pool in place.

    projected: [R, 3·channels]. pool: see short_conv_prefill. slots: int64 [R], all different.
    positions: int64 [R], which have no influence: only states that are rounded stochastically need them.
    """
    return gated_update(*gate_and_inputs(projected), constants, pool, slots, positions)


def gate_and_inputs(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Return C, and the convolution's inputs B·x, [T, channels] each."""
    B, C, x = torch.chunk(projected, 3, dim=-1)
    return C, B * x


def gated_update(
    gate: Tensor, inputs: Tensor, constants: ShortConvConstants, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Compute short_conv_decode for C and the convolution's inputs, [R, channels] each."""
    y = conv1d.conv1d_update(inputs, constants.taps, constants.bias, pool, slots, activate=False)
    return (gate.float() * y).to(gate.dtype)
