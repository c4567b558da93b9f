"""Sizes of tiles and grids. Triton's own functions of these names take 2 µs a call, because kernels may call them."""


def cdiv(amount: int, size: int) -> int:
    """Return how many parts of up to `size` a positive amount has."""
    return -(-amount // size)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
