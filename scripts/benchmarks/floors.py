"""What no implementation can beat: a step reads the weights and each row's keys, and reads and writes its state."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.config import ModelConfig
from models.loading.checkpoint import find_family

# Bits a weight of a matrix takes, with its part of the scales of a group of 32.
BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.5, "q8_0": 8.5, "int4": 4.5, "q4_0": 4.5}


@dataclass(frozen=True)
class Floor:
    """weights: bytes that a step reads; state: bytes that a row's state moves; matrices: numbers in the projections.

    keys: bytes of keys and values of one token.
    """

    weights: float
    state: float
    matrices: int
    keys: float

    def decode(self, rows: int, bandwidth: float, behind: int) -> float:
        """Tokens a second at most behind so many, where memory moves `bandwidth` bytes a second."""
        return rows * bandwidth / (self.weights + rows * (self.state + behind * self.keys))

    def prefill(self, operations: float) -> float:
        """Tokens a second at most, if projections were all, at so many operations a second."""
        return operations / (2 * self.matrices)


def floor_of(config: dict[str, Any], weights: str = "bf16", state_bytes: int = 4) -> Floor:
    """Of a model of this config.json with weights of a kind of BITS and states of so many bytes a number."""
    with torch.device("meta"):
        model = find_family(ModelConfig(config)).build(ModelConfig(config), torch.bfloat16, torch.float32)
    assert isinstance(model, nn.Module)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    others = sum(parameter.nbytes for name, parameter in model.named_parameters() if name not in matrices)
    # The embedding is the head too: a step reads it once as that.
    read = sum(matrices.values()) * BITS[weights] / 8 + others
    state = 2 * state_bytes * sum(math.prod(spec.shape) for spec in model.state_specs())
    projections = sum(count for name, count in matrices.items() if "embed" not in name)
    return Floor(read, state, projections, sum(spec.nbytes for spec in model.kv_specs()))
