"""What a step takes at least whose operations follow one another, by what memory moves and by what is computed.

A step reads the weights and each row's keys, and reads and writes its state; its projections take as long as reading
their weights, or as multiplying by them, if that is longer. Of experts it reads those that a row has; rows are taken to
choose theirs independently of each other, as they do with random weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.models.config import ModelConfig
from baton.models.layers.attention import Attention
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.mla import LatentAttention
from baton.models.loading.checkpoint import find_family
from scripts.benchmarks.common.machine import Probe

HEAD = "lm_head.weight"
# Bits a weight of a matrix takes, with its part of the scales of a group of 32.
BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.5, "q8_0": 8.5, "int4": 4.5, "q4_0": 4.5}
FLOATS = ("f32", "bf16")


@dataclass(frozen=True)
class Mixture:
    """A layer's experts: how many, how many of them a token has, and the numbers of one."""

    count: int
    top_k: int
    numbers: float

    def read(self, rows: int) -> float:
        """Numbers that a step of so many tokens reads, on average."""
        return self.numbers * self.count * (1 - (1 - self.top_k / self.count) ** rows)


@dataclass(frozen=True)
class Floor:
    """bytes_each: of a number of a matrix, of which the projections and the head have so many. others: bytes of all
    other weights.

    state: bytes that a row's state moves; keys: of keys and values of one token; scores: numbers that a token
    multiplies by for each position that it attends to. is_float: else products may be faster than the probed rate.
    """

    bytes_each: float
    projections: int
    head: int
    experts: list[Mixture]
    others: float
    state: float
    keys: float
    scores: int
    is_float: bool

    def decode(self, rows: int, probe: Probe, behind: int) -> float:
        """Tokens a second at most behind so many."""

        def product(read: float, multiplied: float) -> float:
            computing = 2 * rows * multiplied / probe.operations if self.is_float else 0.0
            return max(read * self.bytes_each / probe.read, computing)

        dense = self.projections + self.head
        seconds = product(dense, dense)
        seconds += sum(product(layer.read(rows), layer.top_k * layer.numbers) for layer in self.experts)
        seconds += (self.others + rows * behind * self.keys) / probe.read + rows * self.state / probe.updated
        return rows / seconds

    def prefill(self, probe: Probe, tokens: int) -> float:
        """Tokens a second at most of so many, if projections and attention were all."""
        matrices = self.projections + sum(layer.top_k * layer.numbers for layer in self.experts)
        return probe.operations / (2 * matrices + self.scores * tokens)


def floor_of(config: dict[str, Any], weights: str = "bf16", state_bytes: int = 4) -> Floor:
    """Of a model of this config.json with weights of a kind of BITS and states of so many bytes a number."""
    with torch.device("meta"):
        model = find_family(ModelConfig(config)).build(ModelConfig(config), torch.bfloat16, torch.float32)
    assert isinstance(model, nn.Module)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    routed = {name for name, shape in shapes.items() if ".experts." in name and len(shape) == 3}
    # The embedding is the head too, which a step reads once; beside a head of its own only rows of it are read.
    head = matrices.get(HEAD) or next(count for name, count in matrices.items() if "embed" in name)
    return Floor(
        bytes_each=BITS[weights] / 8,
        projections=sum(count for name, count in matrices.items() if "embed" not in name and name != HEAD),
        head=head,
        experts=mixtures_of(model),
        others=sum(p.nbytes for name, p in model.named_parameters() if name not in matrices.keys() | routed),
        state=2 * state_bytes * sum(math.prod(spec.shape) for spec in model.state_specs()),
        keys=sum(spec.nbytes for spec in model.kv_specs()),
        scores=sum(scores_of(module) for module in model.modules()),
        is_float=weights in FLOATS,
    )


def mixtures_of(model: nn.Module) -> list[Mixture]:
    """In each layer that has them."""
    routers = [module for module in model.modules() if isinstance(module, SoftmaxRouter | SigmoidRouter)]
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in stacks]
    counts = [len(stack.input_linear) for stack in stacks]
    return [
        Mixture(count, router.rule.top_k, size / count)
        for router, count, size in zip(routers, counts, sizes, strict=True)
    ]


def scores_of(module: nn.Module) -> int:
    """Numbers of the keys and values of all heads of an attention layer, for one position."""
    if isinstance(module, Attention):
        return 2 * module.settings.heads * module.settings.head_dim
    if isinstance(module, LatentAttention):
        s = module.settings
        return s.heads * (s.own + s.shared + s.value)
    return 0
