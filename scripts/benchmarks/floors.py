"""What no implementation can beat: a step reads the weights and each row's keys, and reads and writes its state.

Of experts it reads those that a row has; rows are taken to choose theirs independently of each other, as they do with
random weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from models.loading.checkpoint import find_family

HEAD = "lm_head.weight"
# Bits a weight of a matrix takes, with its part of the scales of a group of 32.
BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.5, "q8_0": 8.5, "int4": 4.5, "q4_0": 4.5}


@dataclass(frozen=True)
class ExpertBytes:
    """A layer's: how many experts, how many of them a token has, and the bytes of one."""

    count: int
    top_k: int
    size: float

    def read(self, rows: int) -> float:
        """Bytes that a step of so many tokens reads, on average."""
        return self.size * self.count * (1 - (1 - self.top_k / self.count) ** rows)


@dataclass(frozen=True)
class Floor:
    """weights: bytes that every step reads; state: bytes that a row's state moves; matrices: numbers in the projections
    of a token.

    keys: bytes of keys and values of one token.
    """

    weights: float
    experts: list[ExpertBytes]
    state: float
    matrices: int
    keys: float

    def decode(self, rows: int, bandwidth: float, behind: int) -> float:
        """Tokens a second at most behind so many, where memory moves `bandwidth` bytes a second."""
        weights = self.weights + sum(layer.read(rows) for layer in self.experts)
        return rows * bandwidth / (weights + rows * (self.state + behind * self.keys))

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
    routed = {name: math.prod(shape) for name, shape in shapes.items() if ".experts." in name and len(shape) == 3}
    others = sum(p.nbytes for name, p in model.named_parameters() if name not in matrices | routed)
    # The embedding is the head too, which a step reads once; beside a head of its own only rows of it are read.
    untied = [name for name in matrices if "embed" in name and HEAD in matrices]
    read = sum(count for name, count in matrices.items() if name not in untied) * BITS[weights] / 8 + others
    state = 2 * state_bytes * sum(math.prod(spec.shape) for spec in model.state_specs())
    experts = experts_of(model, BITS[weights] / 8)
    projections = sum(count for name, count in matrices.items() if "embed" not in name and name != HEAD)
    projections += sum(round(layer.top_k * layer.size / BITS[weights] * 8) for layer in experts)
    return Floor(read, experts, state, projections, sum(spec.nbytes for spec in model.kv_specs()))


def experts_of(model: nn.Module, bytes_each: float) -> list[ExpertBytes]:
    """In each layer that has them; bytes_each: of a number of theirs."""
    routers = [module for module in model.modules() if isinstance(module, SoftmaxRouter | SigmoidRouter)]
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in stacks]
    counts = [len(stack.input_linear) for stack in stacks]
    return [
        ExpertBytes(count, router.rule.top_k, size / count * bytes_each)
        for router, count, size in zip(routers, counts, sizes, strict=True)
    ]
