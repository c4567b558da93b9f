"""Token sequences as they travel: int32 in native byte order, packed into `bytes`."""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

Tokens: TypeAlias = bytes
WIDTH = 4


def pack(ids: Iterable[int]) -> bytes:
    """Pack token ids into int32 bytes; OverflowError outside int32."""
    return array("i", ids).tobytes()


def unpack(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("i").tolist()


def count(tokens: bytes) -> int:
    return len(tokens) // WIDTH


def cut(tokens: bytes, start: int, stop: int) -> bytes:
    """The tokens at indices [start, stop)."""
    return tokens[start * WIDTH : stop * WIDTH]


def common_prefix(a: bytes, b: bytes) -> int:
    """How many leading tokens `a` and `b` share: whole-slice comparisons, halving the window."""
    low, high = 0, min(len(a), len(b)) // WIDTH
    if a[: high * WIDTH] == b[: high * WIDTH]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * WIDTH : middle * WIDTH] == b[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low
