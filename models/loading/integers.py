"""What a model's weights will take as integers, told before any of them is there."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from baton.kernels.linear.quantized import OUTPUTS_AT_ONCE, quantize
from baton.kernels.moe.experts import PARTS
from baton.models.layers.experts import Experts
from baton.models.layers.linear import Embedding, Linear


def bytes_saved(model: nn.Module, bits: int) -> int:
    """By making integers of its projections and experts; parts of weights are tried, on the meta device."""
    return sum(
        parameter.nbytes - matrices * integer_bytes(outputs, inputs, bits)
        for parameter, matrices, outputs, inputs in matrices_of(model)
    )


def matrices_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, int, int, int]]:
    """Weights that become integers: each with the number of its matrices, and their outputs and inputs."""
    for module in model.modules():
        if isinstance(module, Linear) or (isinstance(module, Embedding) and module.tied):
            yield module.weight, 1, *module.weight.shape
        elif isinstance(module, Experts):
            for weight, parts in ((module.input_linear, PARTS[module.activation]), (module.output_linear, 1)):
                count, rows, inputs = weight.shape
                yield weight, count * parts, rows // parts, inputs


@cache
def integer_bytes(outputs: int, inputs: int, bits: int) -> int:
    whole, rest = divmod(outputs, OUTPUTS_AT_ONCE)
    if whole and outputs > OUTPUTS_AT_ONCE:
        return whole * integer_bytes(OUTPUTS_AT_ONCE, inputs, bits) + (integer_bytes(rest, inputs, bits) if rest else 0)
    return quantize(torch.empty(outputs, inputs, device="meta"), bits).data.nbytes
