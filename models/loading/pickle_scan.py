"""A check of a pickle's opcodes before it is read, because Python's reader trusts the sizes that they name.

It fills a list up to any index of the memo, and crashes when it hashes tuples that are nested too deeply.
"""

import pickle
import pickletools
from collections.abc import Iterator

MOST_BYTES = 1 << 28
"""A description of a million tensors is smaller."""
MOST_VALUES = 1000
"""The most values in a tuple and the tuples inside it, where a tuple that is used twice counts twice."""
TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


def check_pickle(data: bytes) -> None:
    """Raise UnpicklingError or ValueError for a pickle that could take much memory or time, or crash the reader."""
    if len(data) > MOST_BYTES:
        raise pickle.UnpicklingError(f"its data.pkl has {len(data)} bytes, more than {MOST_BYTES}")
    sizes = Sizes()
    for name, argument in _operations(data):
        if name in ("FRAME", *PUTS) and not 0 <= int(argument) <= len(data):
            raise pickle.UnpicklingError(f"its data.pkl names {argument} in {name}, more than its own bytes")
        sizes.run(name, argument)


def _operations(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name of each opcode and its argument, 0 if that is not an integer."""
    for code, argument, _ in pickletools.genops(data):
        yield code.name, argument if isinstance(argument, int) else 0


class Sizes:
    """The reader's stack and memo, with the number of values in each tuple instead of the tuple; 1 for others."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def run(self, name: str, argument: int) -> None:
        """Apply one opcode. Raises UnpicklingError for a large tuple, and if the stack has too few values."""
        if name == "MARK":
            self._marks.append(len(self._stack))
        elif name in GETS:
            self._stack.append(self._memo.get(argument, 1))
        elif name in PUTS or name == "MEMOIZE":
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._top()
        elif name == "DUP":
            self._stack.append(self._top())
        elif name == "POP" and self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._replace(name)

    def _top(self) -> int:
        if not self._stack:
            raise pickle.UnpicklingError("its data.pkl uses a value that is not there")
        return self._stack[-1]

    def _replace(self, name: str) -> None:
        """Take the values that an opcode consumes from the stack, and push its results."""
        before, after = CODES[name].stack_before, CODES[name].stack_after
        if pickletools.markobject in before:
            start = (self._marks.pop() if self._marks else -1) - before.index(pickletools.markobject)
        else:
            start = len(self._stack) - len(before)
        if start < 0:
            raise pickle.UnpicklingError("its data.pkl uses a value that is not there")
        size = 1 + (sum(self._stack[start:]) if name in TUPLES else 0)
        if size > MOST_VALUES:
            raise pickle.UnpicklingError(f"its data.pkl has a tuple of more than {MOST_VALUES} values")
        self._stack[start:] = [size] * len(after)


CODES = {code.name: code for code in pickletools.opcodes}
