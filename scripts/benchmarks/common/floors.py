"""The floor: a lower bound of the time of a step, and so an upper bound of the speed.

The floor follows from memory traffic and arithmetic at the measured speeds of the machine (machine.Probe).
A step runs its operations one after another. It reads the weights and each row's keys and values, and reads and writes
each row's state. A projection takes as long as reading its weights or as multiplying by them, whichever is longer.
A step reads only the experts that its rows use; rows are assumed to choose experts independently of each other, which
is true for random weights.
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
# Bits of one weight of a matrix. In quantized types, 32 weights share a scale of 16 bits: half a bit a weight.
BITS = {
    "f32": 32.0,
    "bf16": 16.0,
    "int8": 8.5,
    "q8_0": 8.5,
    "int4": 4.5,
    "q4_0": 4.5,
    "q4_k": 4.5,
    "q5_k": 5.5,
    "q6_k": 6.5625,
}
FLOATS = ("f32", "bf16")


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer."""

    count: int
    top_k: int  # experts that one token uses
    numbers: float  # number of weights of one expert

    def read(self, rows: int) -> float:
        """Return the expected number of weights that a step with `rows` tokens reads."""
        return self.numbers * self.count * (1 - (1 - self.top_k / self.count) ** rows)


@dataclass(frozen=True)
class Floor:
    """The bytes that a step of a model moves and the products that it computes."""

    bytes_each: float  # bytes of one weight of a matrix
    projections: int  # number of weights of all matrices except experts, embedding and head
    head: int  # number of weights of the output head
    experts: list[Mixture]  # experts of each layer that has any
    others: float  # bytes of all other weights (norms, convolutions, ...)
    state: float  # bytes read and written for one row's state in one step
    keys: float  # bytes of the keys and values of one token
    scores: int  # multiply-adds of one token's attention for each position that the token attends to
    is_float: bool  # whether weights are floats; integer products are not counted: they may exceed the probed speed

    def decode(self, rows: int, probe: Probe, history: int) -> float:
        """Return the upper bound of decoded tokens per second, summed over `rows` rows after `history` tokens each."""

        def product(read: float, multiplied: float) -> float:
            computing = 2 * rows * multiplied / probe.operations if self.is_float else 0.0
            return max(read * self.bytes_each / probe.read, computing)

        dense = self.projections + self.head
        seconds = product(dense, dense)
        seconds += sum(product(layer.read(rows), layer.top_k * layer.numbers) for layer in self.experts)
        seconds += (self.others + rows * history * self.keys) / probe.read + rows * self.state / probe.updated
        return rows / seconds

    def prefill(self, probe: Probe, tokens: int) -> float:
        """Return the upper bound of prompt tokens per second. Only projections, experts and attention count."""
        matrices = self.projections + sum(layer.top_k * layer.numbers for layer in self.experts)
        return probe.operations / (2 * matrices + self.scores * tokens)


def floor_of(config: dict[str, Any], weights: str = "bf16", state_bytes: int = 4) -> Floor:
    """Return the floor of a model.

    config: the model's config.json. weights: type of the weights, a key of BITS.
    state_bytes: bytes of one number of a state.
    """
    with torch.device("meta"):
        model = find_family(ModelConfig(config)).build(ModelConfig(config), torch.bfloat16, torch.float32)
    assert isinstance(model, nn.Module)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    routed = {name for name, shape in shapes.items() if ".experts." in name and len(shape) == 3}
    # Each step reads the whole head. A tied embedding is the head. A separate embedding does not count, because a step
    # reads only a few of its rows.
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
    """Return the experts of each layer that has any."""
    routers = [module for module in model.modules() if isinstance(module, SoftmaxRouter | SigmoidRouter)]
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in stacks]
    counts = [len(stack.input_linear) for stack in stacks]
    return [
        Mixture(count, router.rule.top_k, size / count)
        for router, count, size in zip(routers, counts, sizes, strict=True)
    ]


def scores_of(module: nn.Module) -> int:
    """Return the multiply-adds of an attention layer for one token and one earlier position; 0 for other modules."""
    if isinstance(module, Attention):
        return 2 * module.settings.heads * module.settings.head_dim
    if isinstance(module, LatentAttention):
        s = module.settings
        return s.heads * (s.own + s.shared + s.value)
    return 0
