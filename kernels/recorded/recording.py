"""A computation that consists of native functions: recorded once, then replayed by one call.

Beside its arithmetic a step of a small model is Python between its functions, and at each of them a wait for the
interpreter's lock. As a CUDA graph does, a recording runs the same functions over the same memory: its inputs are
tensors that the caller writes to, and its output is one tensor, written anew each time.
"""

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.native import FLOAT, INT64, POINTER
from baton.kernels.recorded.memory import Lifetime, SharedMemory, lay_out
from baton.kernels.recorded.watching import Allocations, NotRecordable
from baton.kernels.rms_norm import add_rms_norm

NAME = "baton_replay"


@dataclass(frozen=True, slots=True)
class Call:
    """address: of the function that takes words. pointers: which of them are addresses."""

    address: int
    words: list[int]
    pointers: list[int]


class Buffers:
    """The memory that was asked for on the way, and where it moves to."""

    def __init__(self, made: Sequence[Tensor]) -> None:
        self._sizes = {tensor.data_ptr(): tensor.nbytes for tensor in made if tensor.nbytes}
        self._begins = sorted(self._sizes)
        self._targets: list[int] = []

    def lifetimes(self, calls: Sequence[Call], output: Tensor) -> list[Lifetime]:
        """Of each, from the first call that is given an address in it to the last; the output's has no end."""
        users: list[list[int]] = [[] for _ in self._begins]
        for number, address in _uses(calls, output):
            if (at := self._find(address)) is not None:
                users[at].append(number)
        sizes = [self._sizes[begin] for begin in self._begins]
        return [
            Lifetime(size, used[0], used[-1]) if used else Lifetime(0, 0, 0)
            for size, used in zip(sizes, users, strict=True)
        ]

    def move(self, targets: list[int]) -> None:
        """Each to its new address."""
        self._targets = targets

    def moved(self, address: int) -> int:
        """Where an address lies now; itself, if it is not in one of these."""
        at = self._find(address)
        return address if at is None else address - self._begins[at] + self._targets[at]

    def moved_words(self, call: Call) -> Iterator[int]:
        for at, word in enumerate(call.words):
            yield self.moved(word) if at in call.pointers else word

    def _find(self, address: int) -> int | None:
        at = bisect_right(self._begins, address) - 1
        return at if at >= 0 and address < self._begins[at] + self._sizes[self._begins[at]] else None


def _uses(calls: Sequence[Call], output: Tensor) -> Iterator[tuple[int, int]]:
    """(call, address), in order; behind the last call the output's."""
    for number, call in enumerate(calls):
        for at in call.pointers:
            yield number, call.words[at]
    yield len(calls), output.data_ptr()


class Recording:
    """What it computes from, other than what it makes itself, is the caller's to keep where it is."""

    def __init__(self, calls: Sequence[Call], made: Sequence[Tensor], output: Tensor, memory: SharedMemory) -> None:
        buffers = Buffers(made)
        lifetimes = buffers.lifetimes(calls, output)
        offsets, size = lay_out(lifetimes)
        self._memory = memory.take(size)
        base = self._memory.data_ptr()
        buffers.move([base + offset for offset in offsets])
        self._output = self._view(output, buffers.moved(output.data_ptr()) - base)
        self._words = [(INT64 * len(call.words))(*buffers.moved_words(call)) for call in calls]
        self._addresses = (POINTER * len(calls))(*(call.address for call in calls))
        self._rows = (POINTER * len(calls))(*(ctypes.addressof(words) for words in self._words))
        self._run = native.function(NAME)

    def replay(self) -> Tensor:
        """Run the functions over what the inputs hold now. Returns the output, which the next replay writes over."""
        assert self._run is not None
        self._run(len(self._addresses), self._addresses, self._rows)
        return self._output

    def _view(self, output: Tensor, offset: int) -> Tensor:
        """The output's place in this memory; itself, if it is an input."""
        if not 0 <= offset < self._memory.nbytes:
            return output
        memory = self._memory.view(output.dtype)
        return memory.as_strided(output.shape, output.stride(), offset // output.itemsize)


def record(compute: Callable[[], Tensor], memory: SharedMemory) -> Recording:
    """Go through `compute` without running its native functions, which have to be all that it does.

    memory: for what it makes on the way. Raises NotRecordable, and has changed nothing.
    """
    if native.function(NAME) is None:
        raise NotRecordable("no native code is installed")
    calls: list[Call] = []
    allocations = Allocations()
    with native.watched(lambda name, arguments: calls.append(_call(name, arguments))), allocations:
        output = compute()
    return Recording(calls, allocations.made, output, memory)


def _call(name: str, arguments: Sequence[Any]) -> Call:
    types = native.argtypes(name)
    words = [_word(kind, value) for kind, value in zip(types, arguments, strict=True)]
    return Call(native.address_of_words(name), words, [i for i, kind in enumerate(types) if kind is POINTER])


def _word(kind: type, value: Any) -> int:
    """What call.h reads: a pointer or an integer as it is, a float's bits."""
    if kind is FLOAT:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value or 0)


def check() -> None:
    """Raises AssertionError where replayed calls and calls differ."""
    x, weight = torch.linspace(-1, 1, 300).view(3, 100), torch.ones(100)

    def compute() -> Tensor:
        added, normed = add_rms_norm(x, x, weight, 1e-5, 0.5)
        return add_rms_norm(added, normed, weight, 1e-5)[1]

    recording = record(compute, SharedMemory())
    x += 1
    assert torch.equal(recording.replay(), compute())


native.declare(NAME, [INT64, POINTER, POINTER], check)
