"""Decoding with drafts, composed of a layer's operation for one token of each row."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.drafts.feed import Drafts


def decode_drafts(
    decode: Callable[..., Tensor],
    projections: tuple[Tensor, ...],
    columns: tuple[slice, ...],
    constants: object,
    pools: tuple[Tensor, ...],
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of each row one after the other: [fed tokens, …], the outputs of those that are fed.

    Equal, to the bit, to a step of `decode` for each token that is kept, where results do not depend on other rows.

    decode: the operation for one token of each row, which takes (*projections, constants, *pools, slots, positions) and
        updates the pools.
    projections: the layer's inputs, [fed tokens, columns] each.
    columns: those of each projection that decide the state, in their order in the ring; an empty slice where none does.
    slots: int64 [R], all different.
    positions: int64 [R], the absolute position of the first token that each row feeds.
    ring: [rings, K, columns], in the projections' dtype; the inputs of a row's first drafts go to its beginning.
    """
    outputs = list[Tensor]()
    for row, (replayed, first, end, index) in enumerate(drafts.rows):
        slot, position = slots[row : row + 1], positions[row : row + 1]
        for draft in range(replayed):
            inputs = _with_columns(projections, columns, ring[index, draft])
            y = decode(*inputs, constants, *pools, slot, position - replayed + draft)
            outputs.append(y[:0])  # where no row feeds a token, the result has no rows, but columns
        inputs_of = [[x[token : token + 1] for x in projections] for token in range(first, end)]
        own, where = pools, slot
        for number, inputs in enumerate(inputs_of):
            if number == 1:
                own, where = tuple(pool[slot] for pool in pools), torch.zeros_like(slot)
            outputs.append(decode(*inputs, constants, *own, where, position + number))
        for draft, token in enumerate(range(first + 1, end)):
            ring[index, draft] = torch.cat([x[token, part] for x, part in zip(projections, columns, strict=True)])
    return torch.cat(outputs)


def _with_columns(projections: tuple[Tensor, ...], columns: tuple[slice, ...], inputs: Tensor) -> list[Tensor]:
    """Return projections of one token with these inputs. Columns that decide no state are 0."""
    result, at = list[Tensor](), 0
    for projection, part in zip(projections, columns, strict=True):
        line = projection.new_zeros(1, projection.shape[1])
        target = line[:, part]
        target[0] = inputs[at : at + target.shape[1]]
        at += target.shape[1]
        result.append(line)
    return result
