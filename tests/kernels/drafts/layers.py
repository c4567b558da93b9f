"""Recurrent layers that decode with drafts, compared with the same layers that decode one token at a time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from baton.kernels.delta_net.decode import delta_decode, delta_decode_drafts, kda_decode, kda_decode_drafts
from baton.kernels.drafts import MOST_DRAFTS, Drafts
from baton.kernels.mamba2.decode import mixer_decode, mixer_decode_drafts
from baton.kernels.short_conv import short_conv_decode, short_conv_decode_drafts
from tests.kernels.delta_net.kinds import GATED, KDA, Kind
from tests.kernels.mamba2 import test_decode as mamba2
from tests.kernels.short_conv.test_short_conv import drawn as drawn_convolution

CPU = torch.device("cpu")
TOKENS, SLOTS = 14, 7


@dataclass
class Layer:
    """A recurrent layer, with its pools and the rings of its rows."""

    decode: Callable[..., Tensor]
    decode_drafts: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # [sequences · TOKENS, columns] each, and as much again for drafts that are wrong
    constants: Any
    pools: tuple[Tensor, ...]
    ring: Tensor

    def feed(self, tokens: list[int], *where: object, pools: tuple[Tensor, ...] | None = None) -> Tensor:
        chosen = tuple(x[torch.tensor(tokens, dtype=torch.int64, device=x.device)] for x in self.inputs)
        form = self.decode_drafts if len(where) > 2 else self.decode
        return form(*chosen, self.constants, *(pools or self.pools), *where)


Make = Callable[..., Layer]
"""Returns a layer, given a seed, the dtypes of activations and states, the number of rows, whether it has the sizes of
a real model, and its device.
"""


def mamba2_layer(
    seed: int, dtype: torch.dtype, states: torch.dtype, rows: int, typical: bool = False, device: torch.device = CPU
) -> Layer:
    layout = mamba2.Layout(2, 1, 8 + seed % 9, (19, 64, 128)[seed % 3], seed % 4 + 1, 2 * rows * TOKENS, True, False)
    if typical:
        layout = replace(mamba2.TYPICAL, rows=layout.rows)
    drawn = mamba2.drawn(layout, dtype, seed, states)
    pools = drawn.conv_pools.to(device)[:SLOTS, 1], drawn.state_pools.to(device)[:SLOTS, 1]
    projected = drawn.projected.to(device)
    ring = _ring(rows, projected.shape[1] - layout.inner, dtype, device)
    return Layer(mixer_decode, mixer_decode_drafts, (projected,), _moved(drawn.constants, device), pools, ring)


def gated_layer(
    seed: int, dtype: torch.dtype, states: torch.dtype, rows: int, typical: bool = False, device: torch.device = CPU
) -> Layer:
    constants, inputs, pools = _net(GATED, seed, dtype, states, rows, typical, device)
    inner = pools[1].shape[1] * pools[1].shape[2]
    ring = _ring(rows, inputs[0].shape[1] - inner, dtype, device)
    return Layer(delta_decode, delta_decode_drafts, inputs, constants, pools, ring)


def kda_layer(
    seed: int, dtype: torch.dtype, states: torch.dtype, rows: int, typical: bool = False, device: torch.device = CPU
) -> Layer:
    constants, inputs, pools = _net(KDA, seed, dtype, states, rows, typical, device)
    ring = _ring(rows, sum(x.shape[1] for x in inputs[:2]), dtype, device)
    return Layer(kda_decode, kda_decode_drafts, inputs, constants, pools, ring)


def short_conv_layer(
    seed: int, dtype: torch.dtype, states: torch.dtype, rows: int, typical: bool = False, device: torch.device = CPU
) -> Layer:
    """Return a short convolution. Its states are float32, whatever `states` is."""
    shape = (3, 2048) if typical else (seed % 4 + 1, 130 + seed)
    drawn = drawn_convolution(2 * rows * TOKENS, SLOTS, shape, dtype, seed)
    ring, constants = _ring(rows, shape[1], dtype, device), _moved(drawn.constants, device)
    inputs, pools = (drawn.projected.to(device),), (drawn.memory.to(device)[:, 1],)
    return Layer(short_conv_decode, short_conv_decode_drafts, inputs, constants, pools, ring)


LAYERS: list[Make] = [mamba2_layer, gated_layer, kda_layer]
"""The layers with a convolution and a recurrent state."""
EVERY_LAYER = [*LAYERS, short_conv_layer]


def _net(
    kind: Kind, seed: int, dtype: torch.dtype, states: torch.dtype, rows: int, typical: bool, device: torch.device
) -> tuple[object, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return the constants, the inputs and the pools of a delta net."""
    layout = kind.typical if typical else kind.small
    net = kind.drawn(layout, 2 * rows * TOKENS, SLOTS, dtype, seed, states)
    pools = net.conv_pools.to(device)[:, 1], net.state_pools.to(device)[:, 1]
    return _moved(net.constants, device), tuple(x.to(device) for x in net.inputs), pools


def _ring(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((rows + 1, MOST_DRAFTS, columns), torch.nan, dtype=dtype, device=device)


def _moved(constants: Any, device: torch.device) -> Any:
    """Return a copy of a layer's constants on a device."""
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(constants, **moved)


def assert_drafts_change_no_bit(layer: Layer, rows: int, seed: int) -> None:
    """Check the results of all accepted tokens, and the states at the end."""
    chance, start, device = random.Random(seed), 1000, layer.ring.device
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:rows].to(device)
    plain = tuple(pool.clone() for pool in layer.pools)
    places = torch.arange(start, start + TOKENS, device=device).split(1)
    expected = [
        [layer.feed([row * TOKENS + t], slots[row : row + 1], at, pools=plain) for t, at in enumerate(places)]
        for row in range(rows)
    ]
    done, pending = [0] * rows, [0] * rows  # tokens whose results are known, and those of them that are not stored
    while min(done) < TOKENS or any(pending):
        going = [row for row in chance.sample(range(rows), rows) if done[row] < TOKENS or pending[row]]
        tokens, fed, right = list[int](), list[int](), list[int]()
        for row in going:
            left = TOKENS - done[row]
            count = min(left, 1 + chance.choice([0, 1, 4, MOST_DRAFTS]))
            right.append(min(count, chance.randint(1, count)) if count else 0)
            wrong = rows * TOKENS
            tokens += [row * TOKENS + done[row] + i + (wrong if i >= right[-1] else 0) for i in range(count)]
            fed.append(count)
        drafts = Drafts.of([pending[row] for row in going], fed, going, device)
        at = torch.tensor([start + done[row] for row in going], device=device)
        y = layer.feed(tokens, slots[torch.tensor(going, device=device)], at, drafts, layer.ring)
        first = 0
        for row, count, accepted in zip(going, fed, right, strict=True):
            for i in range(accepted):
                assert torch.equal(y[first + i], expected[row][done[row] + i][0])
            first += count
            done[row] += accepted
            pending[row] = max(accepted - 1, 0)
    for found, exact in zip(layer.pools, plain, strict=True):
        assert torch.equal(found, exact)
