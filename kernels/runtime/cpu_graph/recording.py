"""Recording of a computation that consists of native functions, and its replay with one call.

A step of a small model spends much of its time in Python between native functions, and waiting for the interpreter's
lock at each of them. A recording avoids both costs, as a CUDA graph does on a GPU: it calls the same functions with the
same addresses. Its inputs are tensors that the caller writes to; its output is one tensor, which each replay
overwrites.
"""

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT64, POINTER
from baton.kernels.runtime.cpu_graph.memory import Lifetime, SharedMemory, lay_out
from baton.kernels.runtime.cpu_graph.watching import Allocations, NotRecordable

NAME = "baton_replay"
PROBE = "baton_add_scaled"
"""A function that only the checks in this file call: y += factor * x, float32."""


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of a native function."""

    address: int  # address of the function's variant that takes an array of words
    words: list[int]  # the call's arguments, 64 bits each
    pointers: list[int]  # indices of the words that are addresses


class Buffers:
    """The tensors that were allocated during a recording, and the addresses that they are moved to."""

    def __init__(self, made: Sequence[Tensor]) -> None:
        self._sizes = {tensor.data_ptr(): tensor.nbytes for tensor in made if tensor.nbytes}
        self._begins = sorted(self._sizes)
        self._targets: list[int] = []

    def lifetimes(self, calls: Sequence[Call], output: Tensor) -> list[Lifetime]:
        """Return each buffer's lifetime: from the first call with an address in it to the last.

        The output's lifetime ends after all calls.
        """
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
        """Set the new address of each buffer, in the order of `lifetimes`."""
        self._targets = targets

    def moved(self, address: int) -> int:
        """Return the new address of an old one; the same address if it is in none of the buffers."""
        at = self._find(address)
        return address if at is None else address - self._begins[at] + self._targets[at]

    def moved_words(self, call: Call) -> Iterator[int]:
        """Yield the words of a call, with addresses replaced by the new ones."""
        for at, word in enumerate(call.words):
            yield self.moved(word) if at in call.pointers else word

    def _find(self, address: int) -> int | None:
        """Return the index of the buffer that an address lies in; None if it lies in none."""
        at = bisect_right(self._begins, address) - 1
        return at if at >= 0 and address < self._begins[at] + self._sizes[self._begins[at]] else None


def _uses(calls: Sequence[Call], output: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (number of the call, address) for each address that a call uses, in order; after the last, the output's."""
    for number, call in enumerate(calls):
        for at in call.pointers:
            yield number, call.words[at]
    yield len(calls), output.data_ptr()


class Recording:
    """Recorded calls that can be replayed.

    Tensors that were not allocated during the recording (inputs, weights, pools) must stay alive and in place; the
    caller is responsible for that.
    """

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
        self._run = cpp.function(NAME)

    def replay(self) -> Tensor:
        """Run the calls on the current contents of the inputs. Return the output, which the next replay overwrites."""
        assert self._run is not None
        self._run(len(self._addresses), self._addresses, self._rows)
        return self._output

    def _view(self, output: Tensor, offset: int) -> Tensor:
        """Return a view of the shared memory at this byte offset; `output` itself if the offset is outside of it."""
        if not 0 <= offset < self._memory.nbytes:
            return output
        memory = self._memory.view(output.dtype)
        return memory.as_strided(output.shape, output.stride(), offset // output.itemsize)


def record(compute: Callable[[], Tensor], memory: SharedMemory) -> Recording:
    """Call `compute` without running its native functions, and record the calls of these functions.

    Raise NotRecordable if `compute` runs any operation other than allocations and views; no tensor has been changed
    then.

    memory: holds the intermediate results and the output of replays.
    """
    if cpp.function(NAME) is None:
        raise NotRecordable("no native code is installed")
    calls: list[Call] = []
    allocations = Allocations()
    with cpp.watched(lambda name, arguments: calls.append(_call(name, arguments))), allocations:
        output = compute()
    return Recording(calls, allocations.made, output, memory)


def _call(name: str, arguments: Sequence[Any]) -> Call:
    """Return the record of a call."""
    types = cpp.argtypes(name)
    words = [_word(kind, value) for kind, value in zip(types, arguments, strict=True)]
    return Call(cpp.address_of_words(name), words, [i for i, kind in enumerate(types) if kind is POINTER])


def _word(kind: type, value: Any) -> int:
    """Return an argument as the word that call.h reads: a pointer or integer unchanged, a float's 32 bits."""
    if kind is FLOAT:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value or 0)


def check() -> None:
    """Raise AssertionError if replayed calls and direct calls differ."""
    x, y = torch.linspace(-1, 1, 300), torch.zeros(300)

    def compute() -> Tensor:
        _add_scaled(x, 0.5, y)
        _add_scaled(y, 2.0, y)
        return y

    recording = record(compute, SharedMemory())
    x += 1
    replayed = recording.replay().clone()
    assert torch.equal(replayed, 1.5 * x)
    assert torch.equal(compute(), 3 * (replayed + 0.5 * x))


def check_probe() -> None:
    """Raise AssertionError if the function that check() records is wrong."""
    x, y = torch.linspace(-1, 1, 300), torch.ones(300)
    _add_scaled(x, 0.5, y)
    assert torch.equal(y, 1 + 0.5 * x)


def _add_scaled(x: Tensor, factor: float, y: Tensor) -> None:
    """Add factor · x to y in place, float32."""
    run = cpp.function(PROBE)
    assert run is not None
    run(x.numel(), x.data_ptr(), factor, y.data_ptr())


cpp.declare(PROBE, [INT64, POINTER, FLOAT, POINTER], check_probe)
cpp.declare(NAME, [INT64, POINTER, POINTER], check)
