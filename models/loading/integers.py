"""A model's weights of integers: whether it has any, and the memory that they take, computed without the weights."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from baton.kernels.linear.quantized import OUTPUTS_AT_ONCE, quantize
from baton.kernels.moe.experts import PARTS
from baton.models.batch import Model
from baton.models.layers.experts import Experts
from baton.models.layers.linear import Embedding, Linear

QUANTIZED = "without decay, dt, beta and gates"
"""The rule by which weights are quantized, for the fingerprint of states. Change this when other weights are."""


def bytes_saved(model: nn.Module, bits: int) -> int:
    """Return how many bytes are saved by quantizing the model's projections and experts to integers of `bits` bits.

    The size is found by quantizing empty matrices on the meta device.
    """
    return sum(
        parameter.nbytes - matrices * integer_bytes(outputs, inputs, bits)
        for parameter, matrices, outputs, inputs in matrices_of(model)
    )


def matrices_of(model: nn.Module) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yield (weight, number of its matrices, outputs of a matrix, inputs of a matrix) for each quantized weight."""
    for module in model.modules():
        if isinstance(module, Linear):
            weight = module.weight[: module.outputs - module.floats]
            if len(weight):
                yield weight, 1, *weight.shape
        elif isinstance(module, Embedding) and module.tied:
            yield module.weight, 1, *module.weight.shape
        elif isinstance(module, Experts):
            for weight, parts in ((module.input_linear, PARTS[module.activation]), (module.output_linear, 1)):
                count, rows, inputs = weight.shape
                yield weight, count * parts, rows // parts, inputs


@cache
def integer_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a quantized matrix [outputs, inputs]."""
    # `quantize` packs blocks of OUTPUTS_AT_ONCE rows, so most of a matrix is blocks of the same size, which is cached.
    whole, rest = divmod(outputs, OUTPUTS_AT_ONCE)
    if whole and outputs > OUTPUTS_AT_ONCE:
        return whole * integer_bytes(OUTPUTS_AT_ONCE, inputs, bits) + (integer_bytes(rest, inputs, bits) if rest else 0)
    return quantize(torch.empty(outputs, inputs, device="meta"), bits).data.nbytes


def has_integers(model: Model | nn.Module) -> bool:
    """Return whether a model has weights of integers."""
    return next(layers_of_integers(model), None) is not None


def round_inputs(model: Model | nn.Module) -> bool:
    """Let all weights of integers round their inputs to integers of 8 bits. Return whether there are any."""
    layers = list(layers_of_integers(model))
    for layer in layers:
        layer.round_inputs()
    return bool(layers)


def layers_of_integers(model: Model | nn.Module) -> Iterator[Linear | Embedding | Experts]:
    """Yield the layers that have weights of integers."""
    for layer in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(layer, Experts):
            if any(packed.form for packed in layer.packed.values()):
                yield layer
        elif isinstance(layer, Linear | Embedding) and layer.integers is not None:
            yield layer
