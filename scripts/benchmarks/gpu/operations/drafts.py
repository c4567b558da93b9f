"""Operations of recurrent layers with drafts: each row replays REPLAYED tokens, and feeds FED, the first no draft."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from baton.kernels.delta_net.decode import reference as delta_decode
from baton.kernels.drafts import Drafts
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.mamba2.decode import reference as mixer_decode
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of
from scripts.benchmarks.gpu.operations.delta import DeltaNet
from scripts.benchmarks.gpu.operations.kda import KdaNet
from scripts.benchmarks.gpu.operations.mamba2 import Mixer

REPLAYED, FED, RING = 2, 5, 8
Columns = tuple[slice, ...]


def decode_mixer(draw: Draw, mixer: Mixer, rows: int) -> Operation:
    """Build a call of a Mamba-2 mixer."""
    from baton.kernels.mamba2.decode import triton

    projected = draw.normal(rows * FED, mixer.inner + mixer.channels + mixer.heads)
    columns, form = (slice(mixer.inner, None),), triton.mixer_decode_drafts
    exact = partial(decode_drafts, mixer_decode.mixer_decode)
    pools = mixer.pools(draw, rows + 1, torch.float32)
    return _operation(draw, form, exact, (projected,), columns, pools, mixer.constants(draw), mixer.named)


def decode_delta(draw: Draw, net: DeltaNet, rows: int) -> Operation:
    """Build a call of a gated delta net."""
    from baton.kernels.delta_net.decode import triton

    projected, pools = net.projected(draw, rows * FED), net.pools(draw, rows + 1, torch.float32)
    columns, form = (slice(net.inner, None),), triton.delta_decode_drafts
    exact = partial(decode_drafts, delta_decode.delta_decode)
    return _operation(draw, form, exact, (projected,), columns, pools, net.constants(draw), net.named)


def decode_kda(draw: Draw, net: KdaNet, rows: int) -> Operation:
    """Build a call of KDA."""
    from baton.kernels.delta_net.decode import triton

    projected, pools = net.projected(draw, rows * FED), net.pools(draw, rows + 1, torch.float32)
    columns, form = (slice(None), slice(None), slice(0)), triton.kda_decode_drafts
    exact = partial(decode_drafts, delta_decode.kda_decode)
    return _operation(draw, form, exact, projected, columns, pools, net.constants(draw), net.named)


def _operation(
    draw: Draw,
    form: Callable[..., Tensor],
    exact_form: Callable[..., Tensor],
    projections: tuple[Tensor, ...],
    columns: Columns,
    pools: tuple[Tensor, Tensor],
    constants: tuple[Tensor, ...],
    named: Callable[[Sequence[Tensor]], object],
) -> Operation:
    """Build a call of a layer.

    form: the kernels. exact_form: decode_drafts of the layer's reference.
    columns: those of each projection that go into a ring. named: makes the layer's constants of their tensors.
    """
    count, rows = len(projections), len(projections[0]) // FED
    width = sum(x[:, part].shape[1] for x, part in zip(projections, columns, strict=True))
    ring, bounds = draw.normal(rows, RING, width), torch.arange(rows + 1, device=draw.device)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows) + REPLAYED
    where = (slots, positions, bounds * (REPLAYED + FED), bounds * FED, draw.order(rows))

    def call(decode: Callable[..., Tensor], inputs: Sequence[Tensor], *first: object) -> Sequence[Tensor]:
        conv, pool, ring, slots, positions, begins, offsets, rings, *rest = inputs[count:]
        drafts = Drafts(begins, offsets, rings, rows * (REPLAYED + FED), FED - 1)
        return decode(*first, named(rest), (conv, pool), slots, positions, drafts, ring), conv, pool, ring

    def with_two_pools(*arguments: Any) -> Tensor:
        *first, pools, slots, positions, drafts, ring = arguments
        return form(*first, *pools, slots, positions, drafts, ring)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        return call(with_two_pools, inputs, *inputs[:count])

    def exact(*inputs: Tensor) -> Sequence[Tensor]:
        return call(exact_form, inputs, inputs[:count], columns)

    in_rings = rows * (REPLAYED + FED - 1) * bytes_of(ring[0, 0])
    results = rows * FED * prod(pools[1].shape[1:3]) * ring.element_size()
    moved = bytes_of(*projections) + in_rings + results + 2 * rows * bytes_of(pools[0][0], pools[1][0])
    return Operation(run, exact, (*projections, *pools, ring, *where, *constants), moved)
