"""Token sequences as messages carry them: int32 in native byte order, packed into `bytes`."""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

Tokens: TypeAlias = bytes
WIDTH = 4  # bytes of a token


def pack(ids: Iterable[int]) -> bytes:
    """Pack token ids into int32 bytes. Raises OverflowError for an id outside int32."""
    return array("i", ids).tobytes()


def unpack(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("i").tolist()


def count(tokens: bytes) -> int:
    return len(tokens) // WIDTH


def cut(tokens: bytes, start: int, stop: int) -> bytes:
    """Return the tokens at indices [start, stop)."""
    return tokens[start * WIDTH : stop * WIDTH]


def common_prefix(a: bytes, b: bytes) -> int:
    """Return how many leading tokens `a` and `b` share.

    A binary search that compares whole slices, which is memcmp: faster than a loop over tokens in Python.
    """
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
