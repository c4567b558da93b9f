"""Properties that the prefill of every net with a state must have, in C++ and in Triton."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.runtime import cpp
from tests.kernels.installed import rounds_operands
from tests.kernels.packing import Packed
from tests.kernels.rounding import SIGMOID, assert_rounded, assert_within, gamma, likely, norm_terms, unit

Form = Callable[..., Tensor]

OPERANDS = 6
"""Operands of products that are rounded one after the other, where they are rounded: keys (B), queries (C), their
scores, values (x), and for the state keys and values once more.
"""


class HasPools(Protocol):
    """One layer of a net, and pools whose slots hold all layers one after another."""

    @property
    def conv_pools(self) -> Tensor: ...
    @property
    def state_pools(self) -> Tensor: ...


class StatefulNet(HasPools, Protocol):
    def prefill(self, packed: Packed, form: Form, rows: slice = ...) -> Tensor: ...
    def again(self, states: torch.dtype | None = None) -> "StatefulNet": ...
    def alone(self, slot: int) -> "StatefulNet": ...


def state_terms(net: HasPools, tokens: int) -> int:
    """Return the terms of a net's states: convolution, activations, and sums over tokens and a row of the state."""
    return net.conv_pools.shape[2] + 1 + 4 * SIGMOID + tokens + net.state_pools.shape[4]


def output_terms(net: HasPools, y: Tensor) -> int:
    return state_terms(net, len(y)) + norm_terms(y.shape[1])


def output_size(y: Tensor) -> Tensor:
    """Return the size of the terms of each output: that of the inputs, 1; the root mean square of its row; its own."""
    y = y.double()
    return 1 + y.square().mean(-1, keepdim=True).sqrt() + y.abs()


def state_size(states: Tensor) -> Tensor:
    """Return the size of the terms of states: products of a row's and a column's number, each with its own error."""
    states = states.double().abs()
    return 1 + states.amax(-1, keepdim=True) + states.amax(-2, keepdim=True)


def assert_same_to_rounding(
    found: HasPools, y: Tensor, expected: HasPools, exact: Tensor,
    lost: float = 0.0, tokens: slice = slice(None), slots: slice = slice(None),
) -> None:  # fmt: skip
    """Check outputs and states up to rounding, and the convolution's pools bit by bit.

    Inputs have random signs, so results stand for the sums of their terms' magnitudes; `likely` says why.
    lost: the result of `lost_exponent`. tokens, slots: those that are compared.
    """
    # `by` is the error of each of the two results, but only one of them rounds operands. The other one's share covers
    # delta nets: their rule passes errors on to later tokens, which OPERANDS does not count. With one key dimension,
    # where all keys are alike, an error of 1.1 times the first share was found.
    operands = likely(OPERANDS, torch.bfloat16) if y.dtype == torch.bfloat16 and rounds_operands() else 0.0

    def by(terms: int, dtype: torch.dtype) -> float:
        return likely(terms, dtype) + gamma(int(lost), dtype) + operands

    assert_rounded(y[tokens], exact[tokens], output_terms(found, y), output_size(exact[tokens]), by)
    states, others = found.state_pools[slots], expected.state_pools[slots]
    assert_rounded(states, others, state_terms(found, len(y)), state_size(others), by)
    assert torch.equal(found.conv_pools[slots], expected.conv_pools[slots])


def assert_the_same_alone(together: StatefulNet, packed: Packed, form: Form, segments: Iterable[int]) -> None:
    """Assert that each of these segments has the same results if it is computed alone, with NaN in all other slots."""
    nets = {segment: together.alone(packed.slots[segment]) for segment in segments}
    expected = together.prefill(packed, form)
    for segment, net in nets.items():
        slot, rows = packed.slots[segment], slice(*packed.offsets[segment : segment + 2])
        checkpoints = [(0, position, target) for owner, position, target in packed.checkpoints if owner == segment]
        part = Packed([0, rows.stop - rows.start], [packed.starts[segment]], [slot], checkpoints, packed.pool_size)
        assert torch.equal(net.prefill(part, form, rows), expected[rows])
        own = [slot, *(target for _, _, target in checkpoints)]
        assert torch.equal(net.state_pools[own, 1], together.state_pools[own, 1])
        assert torch.equal(net.conv_pools[own, 1], together.conv_pools[own, 1])


def assert_the_same_in_pieces(once: StatefulNet, cuts: list[int], form: Form) -> None:
    """Assert that a prompt in slot 1 has the same outputs and states in one piece and in several pieces.

    cuts: ends of the pieces; the last cut is the end of the prompt. The state at the first cut goes to slot 2.
    """
    pieces = once.again()
    expected = once.prefill(Packed([0, cuts[-1]], [0], [1], [(0, cuts[0], 2)], 3), form)
    for begin, end in pairwise([0, *cuts]):
        part = Packed([0, end - begin], [begin], [1], [] if begin else [(0, end, 2)], 3)
        assert torch.equal(pieces.prefill(part, form, slice(begin, end)), expected[begin:end])
    assert torch.equal(pieces.state_pools, once.state_pools)
    assert torch.equal(pieces.conv_pools, once.conv_pools)


def assert_the_same_by_any_threads(first: StatefulNet, packed: Packed, form: Form) -> None:
    """Assert that threads change no bit. The caller has installed native code, with one thread."""
    serial = first.again()
    expected = serial.prefill(packed, form)
    for threads in (2, 3):
        found = first.again()
        cpp.use_threads(threads)
        assert torch.equal(found.prefill(packed, form), expected)
        assert torch.equal(found.state_pools, serial.state_pools)
        assert torch.equal(found.conv_pools, serial.conv_pools)


def assert_rounded_where_kept(rounded: StatefulNet, packed: Packed, form: Form, truncates: bool = False) -> None:
    """Assert that bfloat16 states are rounded only when written: outputs equal those with float32 states.

    truncates: states are truncated, as in Triton's interpreter, and not rounded to nearest.
    """
    exact = rounded.again(torch.float32)
    assert torch.equal(rounded.prefill(packed, form), exact.prefill(packed, form))
    states = exact.state_pools
    if truncates:
        assert_within(rounded.state_pools, states, 2 * unit(torch.bfloat16) * states.double().abs())
    else:
        assert torch.equal(rounded.state_pools, states.bfloat16())


def assert_nan_stays_in_its_segment(found: StatefulNet, packed: Packed, form: Form, spoil: Callable[[], None]) -> None:
    """Assert that NaN in the second of two segments does not reach the first.

    spoil: writes NaN into the second segment's first token.
    """
    expected, second = found.again(), packed.offsets[1]
    exact = expected.prefill(packed, form)
    spoil()
    y = found.prefill(packed, form)
    assert y[second:].isnan().any() and found.state_pools[packed.slots[1], 1].isnan().any()
    assert torch.equal(y[:second], exact[:second])
    assert torch.equal(found.state_pools[packed.slots[0]], expected.state_pools[packed.slots[0]])
